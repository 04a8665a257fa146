// Steps from C++, by the contract in torchopt_ext/optim.h. tests/python/examples/test_cpp.py
// compares the bits with those of the Python class.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include <cmath>

#include "support.h"

namespace torchopt_ext::test {
namespace {

TEST(FusedAdamW, IsLibtorchsInFp64) {
  for (const double max_grad_norm : {0.0, 0.5}) {
    for (const FusedAdamWOptions& options : kVariants) {
      const Tensors ours = some_params(at::kDouble);
      const Tensors theirs = copies(ours);
      FusedAdamW fused(ours, options);
      fused.max_grad_norm(max_grad_norm);
      const auto with = [&](auto usual) {
        return usual.betas(options.betas()).eps(options.eps()).amsgrad(options.amsgrad());
      };
      torch::optim::AdamW adamw(
          theirs, with(torch::optim::AdamWOptions(1e-2)).weight_decay(options.weight_decay()));
      torch::optim::Adam adam(
          theirs, with(torch::optim::AdamOptions(1e-2)).weight_decay(options.weight_decay()));
      for (int step = 0; step < 6; ++step) {
        give_gradients(ours, static_cast<uint64_t>(step));
        give_gradients(theirs, static_cast<uint64_t>(step));
        const double norm = torch::nn::utils::clip_grad_norm_(
            theirs, max_grad_norm > 0.0 ? max_grad_norm : kInfinity);
        options.decoupled_weight_decay() ? adamw.step() : adam.step();
        fused.step();
        if (max_grad_norm > 0.0) {
          EXPECT_NEAR(fused.grad_norm().item<double>(), norm, 1e-12 * norm);
        } else {
          EXPECT_TRUE(std::isnan(fused.grad_norm().item<double>()));
        }
      }
      for (size_t i = 0; i < ours.size(); ++i) {
        EXPECT_TRUE(ours[i].allclose(theirs[i], 1e-12, 1e-14)) << i;
      }
    }
  }
}

TEST(FusedAdamW, MaximizesAlongTheGradient) {
  const Tensors up = some_params();
  const Tensors down = copies(up);
  FusedAdamW maximizing(up, FusedAdamWOptions().maximize(true));
  FusedAdamW minimizing(down);
  give_gradients(up, 5);
  give_gradients(down, 5, -1.0);
  maximizing.step();
  minimizing.step();
  EXPECT_TRUE(same(up, down));
}

// tests/python/ops tests the operators' bits, also against golden vectors.
TEST(FusedAdamW, HasTheBitsOfTheOperators) {
  auto& operators = c10::Dispatcher::singleton();
  const auto grad_sumsq = operators.findSchemaOrThrow("torchopt_ext::grad_sumsq_", "")
                              .typed<void(at::TensorList, const Tensor&)>();
  const auto control_update =
      operators.findSchemaOrThrow("torchopt_ext::control_update_", "")
          .typed<void(const Tensor&, const Tensor&, const std::optional<Tensor>&,
                      const std::optional<Tensor>&)>();
  const auto adam = operators.findSchemaOrThrow("torchopt_ext::adam_", "")
                        .typed<void(at::TensorList, at::TensorList, at::TensorList, at::TensorList,
                                    at::TensorList, at::TensorList, const Tensor&, double, double,
                                    bool, bool, bool, double, double, double, double, bool)>();
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    for (const FusedAdamWOptions& options : kVariants) {
      const Tensors ours = some_params(dtype);
      const Tensors theirs = copies(ours);
      Tensors moments[3];
      Tensors counts;
      for (const Tensor& param : theirs) {
        param.requires_grad_(false);
        for (Tensors& moment : moments) {
          moment.push_back(torch::zeros_like(param));
        }
        counts.push_back(torch::zeros({}));
      }
      Tensor control = torch::zeros({31}, at::kDouble);
      control.slice(0, 3, 5).fill_(1.0);            // clip_factor, grad_factor
      for (const int64_t field : {0, 7, 10, 19}) {  // max_grad_norm, the scales, lr_factor
        control[field] = 1.0;
      }
      FusedAdamW fused(ours, options);
      fused.max_grad_norm(1.0);
      for (uint64_t step = 0; step < 4; ++step) {
        give_gradients(ours, step);
        fused.step();
        Tensors gradients;
        for (const Tensor& param : ours) {
          gradients.push_back(param.grad());
        }
        const Tensor accumulator = torch::zeros({70}, at::kLong);
        grad_sumsq.call(gradients, accumulator);
        control_update.call(control, accumulator, std::nullopt, std::nullopt);
        adam.call(theirs, gradients, moments[0], moments[1],
                  options.amsgrad() ? moments[2] : Tensors{}, counts, control, options.lr(),
                  options.weight_decay(), options.decoupled_weight_decay(), /*maximize=*/false,
                  /*cautious_weight_decay=*/false, /*decay_follows_lr=*/0.0,
                  std::get<0>(options.betas()), std::get<1>(options.betas()), options.eps(),
                  /*bias_correction=*/true);
        ASSERT_TRUE(same(ours, theirs)) << dtype << " step " << step;
        ASSERT_TRUE(fused.grad_norm().equal(control[2]));
      }
      EXPECT_TRUE(state_of(fused, ours[0]).exp_avg_sq().equal(moments[1][0]));
    }
  }
}

TEST(FusedAdamW, GroupsHaveOptionsOfTheirOwnAndInheritTheRest) {
  const Tensors params = some_params();
  const Tensors alone = copies(params);
  const Tensors first(params.begin(), params.begin() + 2);
  const Tensors second(params.begin() + 2, params.end());
  FusedAdamW optimizer(
      FusedAdamW::ParamGroups{
          OptimizerParamGroup(first),
          {second, std::make_unique<FusedAdamWOptions>(FusedAdamWOptions().weight_decay(0.0))}},
      FusedAdamWOptions(3e-2).weight_decay(0.2));
  FusedAdamW with_decay(Tensors(alone.begin(), alone.begin() + 2),
                        FusedAdamWOptions(3e-2).weight_decay(0.2));
  FusedAdamW without(Tensors(alone.begin() + 2, alone.end()),
                     FusedAdamWOptions(3e-2).weight_decay(0.0));
  for (uint64_t step = 0; step < 3; ++step) {
    give_gradients(params, step);
    give_gradients(alone, step);
    for (torch::optim::Optimizer* each :
         std::initializer_list<torch::optim::Optimizer*>{&optimizer, &with_decay, &without}) {
      for (OptimizerParamGroup& group : each->param_groups()) {
        if (step == 1) {
          group.options().set_lr(5e-2);
        }
      }
      each->step();
    }
    ASSERT_TRUE(same(params, alone));
  }
}

TEST(FusedAdamW, FollowsWhatBecomesOfGroupsAndTensors) {
  const Tensors params = some_params();
  const Tensors expected = copies(params);
  FusedAdamW optimizer(Tensors(params.begin(), params.begin() + 2));
  FusedAdamW first(Tensors(expected.begin(), expected.begin() + 2));
  FusedAdamW later(Tensors(expected.begin() + 2, expected.end()), FusedAdamWOptions(1e-2));
  train(optimizer, params, 0, 2);
  train(first, expected, 0, 2);
  optimizer.add_param_group({Tensors(params.begin() + 2, params.end()),
                             std::make_unique<FusedAdamWOptions>(FusedAdamWOptions(1e-2))});
  FusedAdamW moved(std::move(optimizer));
  train(moved, params, 2, 4);
  train(first, expected, 2, 4);
  train(later, expected, 2, 4);
  EXPECT_TRUE(same(params, expected));
  for (const Tensor& param : params) {
    param.set_data(param.detach().clone());  // same tensor at another address
  }
  for (auto* each : {&moved, &first}) {
    static_cast<FusedAdamWOptions&>(each->param_groups()[0].options()).amsgrad(true);
  }
  train(moved, params, 4, 6);
  train(first, expected, 4, 6);
  train(later, expected, 4, 6);
  EXPECT_TRUE(same(params, expected));
  moved.state().clear();
  first.state().clear();
  later.state().clear();
  train(moved, params, 6, 7);
  train(first, expected, 6, 7);
  train(later, expected, 6, 7);
  EXPECT_TRUE(same(params, expected));
}

TEST(FusedAdamW, LeavesParametersWithoutGradientAlone) {
  const Tensors params = some_params();
  const Tensors before = copies(params);
  FusedAdamW optimizer(params);
  optimizer.step();  // no gradient at all
  EXPECT_TRUE(optimizer.state().empty());
  give_gradients(params, 1);
  params[1].mutable_grad() = Tensor();
  optimizer.step();
  EXPECT_TRUE(params[1].equal(before[1]));
  EXPECT_FALSE(params[0].equal(before[0]));
  EXPECT_EQ(optimizer.state().size(), params.size() - 1);
  give_gradients(params, 2);
  params[0].mutable_grad() = Tensor();
  optimizer.step();
  EXPECT_EQ(state_of(optimizer, params[0]).step().item<float>(), 1.0f);
  EXPECT_EQ(state_of(optimizer, params[1]).step().item<float>(), 1.0f);
  EXPECT_EQ(state_of(optimizer, params[2]).step().item<float>(), 2.0f);
  optimizer.zero_grad();
  EXPECT_FALSE(params[2].grad().defined());
}

// A parameter without gradient is not looked at: it may be anything, also after it was stepped.
TEST(FusedAdamW, StepsBesideAnyParameterWithoutGradient) {
  const Tensor shared = torch::ones({3});
  for (const Tensor& data :
       {torch::ones({4}, at::kBFloat16), torch::ones({4}, at::kChar), torch::ones({2}),
        torch::empty({0}), torch::ones({1}).expand({4}), shared}) {
    const Tensors params{shared.clone().requires_grad_(), torch::ones({4}).requires_grad_(),
                         torch::ones({5}).requires_grad_()};
    FusedAdamW optimizer(params);
    train(optimizer, params, 0, 1);
    params[1].mutable_grad() = Tensor();
    params[1].requires_grad_(false);
    params[1].set_data(data.is_same(shared) ? params[0].detach() : data);
    for (int step = 1; step < 4; ++step) {
      give_gradients({params[0], params[2]}, 7);
      params[step % 2 == 0 ? 0 : 2].mutable_grad() = Tensor();
      optimizer.step();
    }
    EXPECT_EQ(state_of(optimizer, params[0]).step().item<float>(), 3.0F);
    EXPECT_EQ(state_of(optimizer, params[1]).step().item<float>(), 1.0F);
    EXPECT_EQ(state_of(optimizer, params[2]).step().item<float>(), 2.0F);
    params[1].set_data(torch::ones({4}));
    train(optimizer, params, 4, 5);
    EXPECT_EQ(state_of(optimizer, params[1]).step().item<float>(), 2.0F);
  }
}

TEST(FusedAdamW, LeavesNoStateOfAStepThatRaises) {
  const Tensor both = torch::ones({10});
  const Tensors params{both.slice(0, 0, 6).detach().requires_grad_(),
                       both.slice(0, 5, 10).detach().requires_grad_()};
  FusedAdamW optimizer(params);
  give_gradients(params, 1);
  EXPECT_EQ(message_of([&] { optimizer.step(); }), "parameter 1 shares memory with parameter 0");
  params[1].mutable_grad() = torch::ones({5}).to_sparse();
  EXPECT_NE(message_of([&] { optimizer.step(); }), "nothing was raised");
  EXPECT_TRUE(optimizer.state().empty());
  params[1].mutable_grad() = Tensor();
  optimizer.step();
  EXPECT_EQ(optimizer.state().size(), 1);
}

TEST(FusedAdamW, CallsTheClosureBeforeItSteps) {
  const Tensor x = torch::ones({4}).requires_grad_();
  FusedAdamW optimizer({x}, FusedAdamWOptions(0.1).weight_decay(0.0));
  const torch::NoGradGuard no_grad;
  const Tensor loss = optimizer.step([&] {
    optimizer.zero_grad();
    const Tensor sum = (x * x).sum();
    sum.backward();
    return sum;
  });
  EXPECT_EQ(loss.item<float>(), 4.0f);
  EXPECT_TRUE(x.allclose(torch::full({4}, 0.9)));
  EXPECT_FALSE(optimizer.step().defined());
}

TEST(FusedAdamW, SkipsAStepWithANonFiniteGradient) {
  const Tensors params = some_params();
  FusedAdamW optimizer(params);
  optimizer.skip_nonfinite(true);
  train(optimizer, params, 0, 1);
  const Tensors before = copies(params);
  const Tensor moment = state_of(optimizer, params[0]).exp_avg().clone();
  for (const double bad : {kInfinity, -kInfinity, std::nan("")}) {
    give_gradients(params, 1);
    params[4].mutable_grad().view({-1})[7] = bad;
    optimizer.step();
    EXPECT_FALSE(std::isfinite(optimizer.grad_norm().item<double>()));
  }
  EXPECT_TRUE(same(params, before));
  EXPECT_TRUE(state_of(optimizer, params[0]).exp_avg().equal(moment));
  EXPECT_EQ(state_of(optimizer, params[0]).step().item<float>(), 1.0f);
  EXPECT_EQ(optimizer.steps().item<double>(), 4.0);
  EXPECT_EQ(optimizer.skipped_steps().item<double>(), 3.0);
}

TEST(FusedAdamW, MeasuresWithoutClipping) {
  const Tensors params = some_params();
  const Tensors expected = copies(params);
  FusedAdamW measuring(params);
  FusedAdamW plain(expected);
  measuring.max_grad_norm(kInfinity);
  train(measuring, params, 0, 2);
  train(plain, expected, 0, 2);
  EXPECT_TRUE(same(params, expected));
  double sum = 0.0;
  for (const Tensor& param : params) {
    sum += param.grad().to(at::kDouble).square().sum().item<double>();
  }
  EXPECT_NEAR(measuring.grad_norm().item<double>(), std::sqrt(sum), 1e-9);
  give_gradients(params, 9);
  give_gradients(expected, 9);
  for (const Tensors& each : {params, expected}) {
    each[1].mutable_grad()[7] = kInfinity;  // affects no other tensor
  }
  measuring.step();
  plain.step();
  EXPECT_EQ(measuring.grad_norm().item<double>(), kInfinity);
  EXPECT_TRUE(same({params[0], params[4]}, {expected[0], expected[4]}));
}

TEST(FusedAdamW, NamesWhatDoesNotFitAndChangesNothing) {
  const Tensors params = some_params();
  torch::OrderedDict<std::string, Tensor> named;
  const char* const names[] = {"wte", "bias", "scale", "empty", "conv"};
  for (size_t i = 0; i < params.size(); ++i) {
    named.insert(names[i], params[i]);
  }
  FusedAdamW optimizer(named);
  train(optimizer, params, 0, 1);
  const Tensors before = copies(params);
  const auto with_gradient = [&](const Tensor& gradient) {
    give_gradients(params, 1);
    params[1].unsafeGetTensorImpl()->mutable_grad() = gradient;
    return message_of([&] { optimizer.step(); });
  };
  const std::pair<Tensor, const char*> cases[] = {
      {torch::ones({131}), "gradient 1 ('bias') has shape [131], expected [130]"},
      {torch::ones({130}, at::kDouble), "gradient 1 ('bias') has dtype float64, expected float32"},
      {torch::ones({130}).to_sparse(), "gradient 1 ('bias') has layout Sparse"}};
  for (const auto& [gradient, message] : cases) {
    EXPECT_NE(with_gradient(gradient).find(message), std::string::npos) << with_gradient(gradient);
  }
  give_gradients(params, 1);
  state_of(optimizer, params[4]).exp_avg(torch::zeros({2, 3, 6}));
  EXPECT_NE(message_of([&] {
              optimizer.step();
            }).find("exp_avg of parameter 4 ('conv') has shape [2, 3, 6], expected [2, 3, 5]"),
            std::string::npos);
  EXPECT_TRUE(same(params, before));
  const Tensor counts = torch::ones({3}, at::kLong);
  counts.unsafeGetTensorImpl()->mutable_grad() = torch::ones({3});
  EXPECT_NE(
      message_of([&] { FusedAdamW(Tensors{counts}).step(); }).find("parameter 0 has dtype int64"),
      std::string::npos);
}

TEST(FusedAdamWOptions, CompareByValue) {
  EXPECT_TRUE(FusedAdamWOptions(0.5).eps(1e-3) == FusedAdamWOptions(0.5).eps(1e-3));
  EXPECT_FALSE(FusedAdamWOptions(0.5) == FusedAdamWOptions(0.5).decoupled_weight_decay(false));
}

TEST(FusedAdamW, RefusesAParameterThatIsListedTwiceOrUndefined) {
  const Tensors params = some_params();
  EXPECT_EQ(message_of([&] { FusedAdamW(Tensors{params[0], Tensor(), Tensor()}); }),
            "parameter 1 is not defined");
  EXPECT_EQ(message_of([&] { FusedAdamW(Tensors{params[0], params[1], params[0]}); }),
            "parameter 2 is parameter 0 again, expected each parameter once");
  torch::OrderedDict<std::string, Tensor> named;
  named.insert("embedding.weight", params[0]);
  named.insert("head.weight", params[0]);
  EXPECT_EQ(message_of([&] { FusedAdamW optimizer(named); }),
            "parameter 'head.weight' is 'embedding.weight' again, expected each parameter once");
}

TEST(FusedAdamW, CountsFromZeroAndEndsWhenItIsMovedFrom) {
  FusedAdamW optimizer(some_params());
  EXPECT_EQ(optimizer.steps().item<double>(), 0.0);
  EXPECT_EQ(optimizer.skipped_steps().item<double>(), 0.0);
  EXPECT_TRUE(std::isnan(optimizer.grad_norm().item<double>()));
  const FusedAdamW other = std::move(optimizer);
  const auto step = [&] { optimizer.step(); };  // NOLINT(bugprone-use-after-move)
  EXPECT_EQ(message_of(step), "this FusedAdamW was moved from");
}

TEST(FusedAdamW, RefusesOptionsOutOfRange) {
  const Tensors params = some_params();
  const auto raised = [&](const FusedAdamWOptions& options) {
    return message_of([&] { FusedAdamW optimizer(params, options); });
  };
  EXPECT_EQ(raised(FusedAdamWOptions(-1.0)), "Invalid learning rate: -1");
  EXPECT_EQ(raised(FusedAdamWOptions().betas({0.9, 1.0})), "Invalid beta parameter at index 1: 1");
  EXPECT_EQ(raised(FusedAdamWOptions().eps(-1.0)), "Invalid epsilon value: -1");
  FusedAdamW optimizer(params);
  give_gradients(params, 1);
  optimizer.max_grad_norm(std::nan(""));
  EXPECT_NE(message_of([&] { optimizer.step(); }).find("Invalid max_grad_norm: nan"),
            std::string::npos);
  EXPECT_NE(message_of([&] {
              FusedAdamW(FusedAdamW::ParamGroups{
                  {params, std::make_unique<torch::optim::AdamWOptions>()}});
            }).find("expected torchopt_ext::FusedAdamWOptions"),
            std::string::npos);
}

}  // namespace
}  // namespace torchopt_ext::test
