#include <torch/optim/serialize.h>
#include <torchopt_ext/optim.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "api/planned_step.h"

namespace torchopt_ext {
namespace {

using torch::optim::OptimizerParamGroup;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

// Raises for options that are invalid at construction. A schedule may later set lr below 0.
void check_initial_options(const FusedAdamWOptions& options) {
  TORCH_CHECK_VALUE(hyper_of(options)[kLr] >= 0.0, "Invalid learning rate: ", options.lr());
}

// Calls visit(name, option) for every option: option(options) is a reference to it. Archives of
// libtorch's Adam and AdamW lack the last two.
template <class Visit>
void for_each_option(const Visit& visit) {
  visit("lr", [](auto& o) -> auto& { return o.lr(); });
  visit("betas", [](auto& o) -> auto& { return o.betas(); });
  visit("eps", [](auto& o) -> auto& { return o.eps(); });
  visit("weight_decay", [](auto& o) -> auto& { return o.weight_decay(); });
  visit("amsgrad", [](auto& o) -> auto& { return o.amsgrad(); });
  visit("maximize", [](auto& o) -> auto& { return o.maximize(); });
  visit("decoupled_weight_decay", [](auto& o) -> auto& { return o.decoupled_weight_decay(); });
}

// Returns a group's options. Replaces each option that equals that of a new object by the
// optimizer's. libtorch 2.15 does so for its own optimizers only (torch/optim/optimizer.h).
std::unique_ptr<FusedAdamWOptions> with_inherited_defaults(const FusedAdamWOptions& of_group,
                                                           const FusedAdamWOptions& defaults) {
  const FusedAdamWOptions usual;
  auto options = std::make_unique<FusedAdamWOptions>(defaults);
  for_each_option([&](const char*, const auto& option) {
    if (option(of_group) != option(usual)) {
      option(*options) = option(of_group);
    }
  });
  check_initial_options(*options);
  return options;
}

// Returns whether the archive has the value, and copies it: the archive keeps its own tensors.
template <class T>
bool read(InputArchive& archive, const std::string& name, T& value, bool may_lack = false) {
  c10::IValue stored;
  const bool there = archive.try_read(name, stored);
  TORCH_CHECK(there || may_lack, "the archive has no ", name,
              ", expected that of an Adam or AdamW optimizer");
  if (there) {
    value = stored.deepcopy().to<T>();
  }
  return there;
}

// Returns the names by parameter. Raises if a parameter is listed twice.
std::unordered_map<const void*, std::string> names_of(
    const torch::OrderedDict<std::string, at::Tensor>& named_params) {
  std::unordered_map<const void*, std::string> names;
  for (const auto& named : named_params) {
    const auto [first, is_new] = names.emplace(named.value().unsafeGetTensorImpl(), named.key());
    TORCH_CHECK_VALUE(is_new, "parameter '", named.key(), "' is '", first->second,
                      "' again, expected each parameter once");
  }
  return names;
}

}  // namespace

FusedAdamWOptions::FusedAdamWOptions(double lr) : lr_(lr) {}

void FusedAdamWOptions::serialize(OutputArchive& archive) const {
  for_each_option([&](const char* name, const auto& option) {
    archive.write(name, c10::IValue(option(*this)));
  });
}

void FusedAdamWOptions::serialize(InputArchive& archive) {
  lacking_.clear();
  for_each_option([&](const std::string& name, const auto& option) {
    const bool may_lack = name == "maximize" || name == "decoupled_weight_decay";
    if (!read(archive, name, option(*this), may_lack)) {
      lacking_.push_back(name);
    }
  });
}

bool FusedAdamWOptions::operator==(const FusedAdamWOptions& other) const {
  bool equal = true;
  for_each_option(
      [&](const char*, const auto& option) { equal = equal && option(*this) == option(other); });
  return equal;
}

double FusedAdamWOptions::get_lr() const { return lr(); }
void FusedAdamWOptions::set_lr(double lr) { lr_ = lr; }

void FusedAdamWParamState::serialize(OutputArchive& archive) const {
  archive.write("step", c10::IValue(static_cast<int64_t>(step().item<float>())));
  for_each_moment(*this, max_exp_avg_sq().defined(), [&](int k, const at::Tensor& moment) {
    archive.write(Adam::kStates[k].name, c10::IValue(moment));
  });
}

void FusedAdamWParamState::serialize(InputArchive& archive) {
  int64_t steps = 0;
  read(archive, "step", steps);
  TORCH_CHECK(steps >= 0 && steps < int64_t{1} << 62, "step is ", steps,
              ", expected a count of steps");
  step_ = torch::scalar_tensor(static_cast<double>(steps), at::kFloat);
  for_each_moment(*this, /*with_max=*/true, [&](int k, at::Tensor& moment) {
    read(archive, Adam::kStates[k].name, moment, /*may_lack=*/k == Adam::kMaxExpAvgSq);
  });
}

FusedAdamW::FusedAdamW(const ParamGroups& param_groups, const FusedAdamWOptions& defaults)
    : Optimizer(ParamGroups{}, std::make_unique<FusedAdamWOptions>(defaults)),
      planned_(std::make_unique<PlannedStep>()) {
  check_initial_options(defaults);
  for (const OptimizerParamGroup& group : param_groups) {
    add_param_group(group);
  }
}

FusedAdamW::FusedAdamW(std::vector<at::Tensor> params, const FusedAdamWOptions& defaults)
    : FusedAdamW(ParamGroups{OptimizerParamGroup(std::move(params))}, defaults) {}

FusedAdamW::FusedAdamW(const torch::OrderedDict<std::string, at::Tensor>& named_params,
                       const FusedAdamWOptions& defaults)
    : FusedAdamW(ParamGroups{}, defaults) {
  planned_ = std::make_unique<PlannedStep>(names_of(named_params));
  add_param_group(OptimizerParamGroup(named_params.values()));
}

FusedAdamW::~FusedAdamW() = default;
FusedAdamW::FusedAdamW(FusedAdamW&& other) noexcept = default;
FusedAdamW& FusedAdamW::operator=(FusedAdamW&& other) noexcept = default;

void FusedAdamW::add_param_group(const OptimizerParamGroup& param_group) {
  planned();
  std::unordered_map<const void*, size_t> numbers;
  const auto list_once = [&](const at::Tensor& param) {
    TORCH_CHECK_VALUE(param.defined(), "parameter ", numbers.size(), " is not defined");
    const auto [first, is_new] = numbers.emplace(param.unsafeGetTensorImpl(), numbers.size());
    TORCH_CHECK_VALUE(is_new, "parameter ", numbers.size(), " is parameter ", first->second,
                      " again, expected each parameter once");
  };
  for (const OptimizerParamGroup& group : param_groups_) {
    std::for_each(group.params().begin(), group.params().end(), list_once);
  }
  std::for_each(param_group.params().begin(), param_group.params().end(), list_once);
  auto options =
      std::make_unique<FusedAdamWOptions>(static_cast<const FusedAdamWOptions&>(*defaults_));
  if (param_group.has_options()) {
    options = with_inherited_defaults(options_of(param_group), *options);
  }
  Optimizer::add_param_group(OptimizerParamGroup(param_group.params()));
  param_groups_.back().set_options(std::move(options));
}

torch::Tensor FusedAdamW::step(LossClosure closure) {
  torch::Tensor loss;
  if (closure != nullptr) {
    const at::AutoGradMode enable_grad(true);
    loss = closure();
  }
  planned().step(param_groups_, state_, max_grad_norm_, skip_nonfinite_);
  return loss;
}

torch::Tensor FusedAdamW::grad_norm() const {
  const torch::Tensor norm = planned().control(&Control::grad_norm);
  return planned().norm_was_measured()
             ? norm
             : at::full_like(norm, std::numeric_limits<double>::quiet_NaN());
}

torch::Tensor FusedAdamW::steps() const { return planned().control(&Control::steps); }

torch::Tensor FusedAdamW::skipped_steps() const {
  return planned().control(&Control::skipped_steps);
}

PlannedStep& FusedAdamW::planned() const {
  TORCH_CHECK(planned_ != nullptr, "this FusedAdamW was moved from");
  return *planned_;
}

void FusedAdamW::save(OutputArchive& archive) const {
  planned();
  torch::optim::serialize<FusedAdamWParamState, FusedAdamWOptions>(archive, *this);
}

void FusedAdamW::load(InputArchive& archive) {
  planned();
  const at::NoGradGuard no_grad;
  ParamGroups groups;  // without options: the archive has them
  for (const OptimizerParamGroup& group : param_groups_) {
    groups.emplace_back(group.params());
  }
  FusedAdamW loaded(groups);
  torch::optim::serialize<FusedAdamWParamState, FusedAdamWOptions>(archive, loaded);
  for (const OptimizerParamGroup& group : loaded.param_groups_) {
    hyper_of(options_of(group));
  }
  planned().fit_state(loaded.param_groups_, loaded.state_);
  std::vector<FusedAdamWOptions> options;
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    const FusedAdamWOptions& before = options_of(param_groups_[g]);
    FusedAdamWOptions& next = options.emplace_back(options_of(loaded.param_groups_[g]));
    const auto lacking = std::exchange(next.lacking_, {});
    for_each_option([&](const char* name, const auto& option) {
      if (std::ranges::find(lacking, name) != lacking.end()) {
        option(next) = option(before);
      }
    });
  }
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    // In place, as libtorch does: the program may hold references to the options.
    static_cast<FusedAdamWOptions&>(param_groups_[g].options()) = options[g];
  }
  state_ = std::move(loaded.state_);
}

}  // namespace torchopt_ext
