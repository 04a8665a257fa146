// The Python module: build information, the optimizers' plan, and functions that are not operators
// (torchopt_ext/_C.pyi has the types). Importing the module registers the operators.
#include <ATen/record_function.h>
#include <pybind11/functional.h>
#include <torch/csrc/utils/pybind.h>
#include <torchopt_ext/partition.h>

#include <algorithm>
#include <array>
#include <bit>
#include <iterator>
#include <utility>

#include "cpu/kernel_table.h"
#include "kernels/algorithms.h"
#include "kernels/control.h"
#include "ops/partition_checks.h"
#include "plan/normalize_rows.h"
#include "plan/weight_copy.h"
#include "python/bindings.h"
#include "python/optimizer_plan.h"

namespace torchopt_ext {
namespace {

namespace py = pybind11;

// The fields of the control block in the order of the struct, which the assertion below checks.
constexpr std::pair<const char*, double Control::*> kControlFields[kControlSize] = {
    {"max_grad_norm", &Control::max_grad_norm},
    {"skip_nonfinite", &Control::skip_nonfinite},
    {"grad_norm", &Control::grad_norm},
    {"clip_factor", &Control::clip_factor},
    {"grad_factor", &Control::grad_factor},
    {"found_inf", &Control::found_inf},
    {"skip", &Control::skip},
    {"grad_scale", &Control::grad_scale},
    {"steps", &Control::steps},
    {"skipped_steps", &Control::skipped_steps},
    {"loss_scale", &Control::loss_scale},
    {"growth_tracker", &Control::growth_tracker},
    {"hysteresis_tracker", &Control::hysteresis_tracker},
    {"growth_factor", &Control::growth_factor},
    {"backoff_factor", &Control::backoff_factor},
    {"growth_interval", &Control::growth_interval},
    {"hysteresis", &Control::hysteresis},
    {"min_scale", &Control::min_scale},
    {"max_scale", &Control::max_scale},
    {"lr_factor", &Control::lr_factor},
    {"scheduled", &Control::scheduled},
    {"warmup_steps", &Control::warmup_steps},
    {"stable_steps", &Control::stable_steps},
    {"decay_steps", &Control::decay_steps},
    {"decay_type", &Control::decay_type},
    {"min_lr_factor", &Control::min_lr_factor},
    {"schedule_generation", &Control::schedule_generation},
    {"orthogonalized", &Control::orthogonalized},
    {"ema_decay", &Control::ema_decay},
    {"ema_warmup", &Control::ema_warmup},
    {"ema_weight", &Control::ema_weight}};
static_assert([] {
  Control numbered{};
  std::array<double, kControlSize> expected{};
  for (int i = 0; i < kControlSize; ++i) {
    numbered.*kControlFields[i].second = expected[i] = i;
  }
  return std::bit_cast<decltype(expected)>(numbered) == expected;
}());

// Adds up to kMaxPendingAdds values exactly, as doubles, and propagates the carries.
void add_values(const at::Tensor& accumulator, const at::Tensor& values) {
  check_accumulator(accumulator, at::kCPU);
  auto& acc = *static_cast<ExactAccumulator*>(accumulator.data_ptr());
  const at::Tensor list = values.to(at::kDouble).contiguous().cpu();
  const auto* x = list.const_data_ptr<double>();
  for (int64_t i = 0; i < list.numel(); ++i) {
    accumulator_add(acc, x[i]);
  }
  accumulator_normalize(acc);
}

Algorithm algorithm_named(const std::string& name) {
  for (int32_t i = 0; i < kAlgorithms; ++i) {
    if (name == declaration_of(Algorithm{i}).name) {
      return Algorithm{i};
    }
  }
  throw py::key_error(name);
}

// Returns the declarations by name, as algorithms() in _C.pyi describes them.
py::dict algorithms() {
  py::dict all;
  for (int32_t i = 0; i < kAlgorithms; ++i) {
    const Declaration declaration = declaration_of(Algorithm{i});
    py::list hypers;
    for (const HyperSpec& spec : declaration.hypers) {
      const py::object usual = spec.range == Range::kFlag ? py::object(py::bool_(spec.usual != 0.0))
                                                          : py::object(py::float_(spec.usual));
      hypers.append(py::make_tuple(spec.name, spec.key != nullptr ? spec.key : spec.name,
                                   spec.index, usual, spec.may_lack, spec.in_operator));
    }
    py::list states;
    for (const StateSpec& state : declaration.states) {
      states.append(
          py::make_tuple(state.name, state.when, state.is_moment, state.as_root, state.by_row));
    }
    all[declaration.name] = py::make_tuple(hypers, states, declaration.writes_direction);
  }
  return all;
}

using MatrixFields = std::tuple<int64_t, int64_t, int64_t, int64_t, double>;

std::vector<Matrix> matrices_of(const std::vector<MatrixFields>& fields) {
  std::vector<Matrix> matrices;
  matrices.reserve(fields.size());
  for (const auto& [first, rows, cols, stride, lr_scale] : fields) {
    matrices.push_back({first, rows, cols, stride, lr_scale});
  }
  return matrices;
}

void normalize_rows_(const at::Tensor& buffer, const std::vector<MatrixFields>& fields,
                     const at::Tensor& averages, double beta2) {
  const std::vector<Matrix> matrices = matrices_of(fields);
  int64_t rows = 0;
  for (const Matrix& matrix : matrices) {
    rows += matrix.rows;
  }
  TORCH_CHECK(averages.scalar_type() == at::kFloat && averages.is_contiguous() &&
                  averages.numel() == rows && averages.device() == buffer.device(),
              "averages are ", dtype_name(averages.scalar_type()), averages.sizes(), " on ",
              averages.device(), ", expected contiguous float32 [", rows, "] on ", buffer.device());
  normalize_rows(buffer, matrices, {averages.data_ptr<float>(), beta2});
}

// OptimizerPlan::GroupAlgorithm with the algorithm's name.
using NamedAlgorithm =
    std::tuple<std::string, std::vector<std::array<double, 3>>, double,
               std::optional<at::ScalarType>, std::function<at::Tensor(const at::Tensor&)>>;

std::unique_ptr<OptimizerPlan> make_plan(const py::list& param_groups, const py::dict& state,
                                         const std::vector<OptimizerPlan::Param>& params,
                                         const std::vector<NamedAlgorithm>& named,
                                         const std::vector<at::Device>& part_devices,
                                         const py::list& idle, const py::object& local_gradients,
                                         const py::object& exchange, bool stochastic_rounding,
                                         uint64_t rounding_seed, bool write_back_gradients,
                                         uint32_t track, int64_t staging_bytes) {
  const StepOptions options{.stochastic_rounding = stochastic_rounding,
                            .write_back_gradients = write_back_gradients,
                            .track = track,
                            .rounding_seed = rounding_seed};
  std::vector<OptimizerPlan::GroupAlgorithm> algorithms;
  algorithms.reserve(named.size());
  for (const auto& [name, coefficients, eps, dtype, instead] : named) {
    algorithms.emplace_back(algorithm_named(name), coefficients, eps, dtype, instead);
  }
  return std::make_unique<OptimizerPlan>(param_groups, state, params, algorithms, part_devices,
                                         idle, local_gradients, exchange, options, staging_bytes);
}

}  // namespace
}  // namespace torchopt_ext

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace torchopt_ext;

  m.attr("ACCUMULATOR_SIZE") = ExactAccumulator::kSize;
  m.attr("CONTROL_FIELDS") = [] {
    py::tuple names(kControlSize);
    for (int i = 0; i < kControlSize; ++i) {
      names[static_cast<size_t>(i)] = kControlFields[i].first;
    }
    return names;
  }();
  m.def("default_bucket_elements", default_bucket_elements, py::arg("world_size"));
  m.def(
      "partition_balanced",
      [](const std::vector<int64_t>& numels, const std::vector<int64_t>& row_lengths,
         int64_t world_size, std::optional<int64_t> bucket_elements, int64_t alignment) {
        const auto [buckets, starts, lengths, cuts] =
            partition_balanced(numels, row_lengths, world_size, bucket_elements, alignment);
        return std::tuple(buckets, starts, lengths, cuts);
      },
      py::arg("numels"), py::arg("row_lengths"), py::arg("world_size"), py::arg("bucket_elements"),
      py::arg("alignment"));
  m.def("algorithms", algorithms);
  m.def(
      "check_hypers",
      [](const std::string& algorithm, const std::vector<double>& values) {
        Hyper hyper{};
        std::ranges::copy(values, hyper.value);
        check_hyper(algorithm_named(algorithm), hyper);
      },
      py::arg("algorithm"), py::arg("values"));
  m.attr("STATES") = kMostStates;
  m.attr("SCALES") = kMostMoments;
  m.def("cpu_kernels", [] { return kernels().name; });
  m.def("accumulator_add", add_values, py::arg("accumulator"), py::arg("values"));
  m.def("observed", at::hasCallbacks);
  m.def("renew_copy", renew_copy, py::arg("copy"), py::arg("weight"),
        py::call_guard<py::gil_scoped_release>());
  m.def(
      "orthogonalize_",
      [](const at::Tensor& buffer, const std::vector<MatrixFields>& matrices,
         const std::vector<std::array<double, 3>>& coefficients, double eps,
         const std::function<at::Tensor(const at::Tensor&)>& instead) {
        orthogonalize_matrices({coefficients, eps, instead}, matrices_of(matrices), buffer);
      },
      py::arg("buffer"), py::arg("matrices"), py::arg("coefficients"), py::arg("eps"),
      py::arg("instead"), py::call_guard<py::gil_scoped_release>());
  m.def("normalize_rows_", normalize_rows_, py::arg("buffer"), py::arg("matrices"),
        py::arg("averages"), py::arg("beta2"), py::call_guard<py::gil_scoped_release>());
  add_carve(m);
  add_param_lists(m);
  py::class_<OptimizerPlan>(m, "OptimizerPlan")
      .def(py::init(&make_plan), py::arg("param_groups"), py::arg("state"), py::arg("params"),
           py::arg("algorithms"), py::arg("part_devices"), py::arg("idle"),
           py::arg("local_gradients"), py::arg("exchange"), py::arg("stochastic_rounding"),
           py::arg("rounding_seed"), py::arg("write_back_gradients"), py::arg("track"),
           py::arg("staging_bytes") = 0)
      .def("release", &OptimizerPlan::release)
      .def(
          "collect",
          [](OptimizerPlan& plan, const py::list& param_groups, const py::dict& state) {
            return plan.collect(param_groups, state);
          },
          py::arg("param_groups"), py::arg("state"))
      .def("accumulate", &OptimizerPlan::accumulate, py::arg("part"), py::arg("accumulator"))
      .def("update", &OptimizerPlan::update, py::arg("part_controls"))
      .def("update_part", &OptimizerPlan::update_part, py::arg("part"), py::arg("control"))
      .def("collected",
           [](const OptimizerPlan& plan) {
             py::list parts;
             for (OptimizerPlan::Collected& part : plan.collected()) {
               parts.append(py::make_tuple(std::move(part.positions), std::move(part.params),
                                           std::move(part.masters), std::move(part.gradients)));
             }
             return parts;
           })
      .def("renew_marks", py::overload_cast<>(&OptimizerPlan::renew_marks))
      .def("step", &OptimizerPlan::step, py::arg("param_groups"), py::arg("state"),
           py::arg("control"), py::arg("accumulator"), py::arg("with_norm"), py::arg("grad_scale"),
           py::arg("found_inf"))
      .def("weight_marks", &OptimizerPlan::weight_marks)
      .def("traces", &OptimizerPlan::traces)
      .def_property_readonly("gradients_copied", &OptimizerPlan::gradients_copied);
}
