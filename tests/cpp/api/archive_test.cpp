// Tests torch::save and torch::load of the optimizer.
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <sstream>

#include "support.h"

namespace torchopt_ext::test {
namespace {

template <class Optimizer>
std::string saved(const Optimizer& optimizer) {
  std::ostringstream stream;
  torch::save(optimizer, stream);
  return stream.str();
}

void set_weights(const Tensors& params, const Tensors& weights) {
  for (size_t i = 0; i < params.size(); ++i) {
    params[i].set_data(weights[i].detach().clone());
  }
}

void expect_near(const Tensors& params, const Tensors& expected) {
  for (size_t i = 0; i < params.size(); ++i) {
    EXPECT_TRUE(params[i].allclose(expected[i], 1e-12, 1e-14)) << i;
  }
}

template <class Optimizer>
void load(Optimizer& optimizer, const std::string& archive) {
  std::istringstream stream(archive);
  torch::load(optimizer, stream);
}

TEST(FusedAdamWArchive, ResumesToTheBit) {
  for (const FusedAdamWOptions& options : kVariants) {
    const Tensors params = some_params();
    FusedAdamW optimizer(params, options);
    train(optimizer, params, 0, 3);
    const std::string archive = saved(optimizer);
    const Tensors resumed = copies(params);
    train(optimizer, params, 3, 6);
    FusedAdamW other(resumed, FusedAdamWOptions(0.5).maximize(true));
    train(other, copies(resumed), 0, 1);
    load(other, archive);
    train(other, resumed, 3, 6);
    EXPECT_TRUE(same(params, resumed));
  }
}

TEST(FusedAdamWArchive, FitsParametersOfOtherStrides) {
  const Tensors params = some_params();
  FusedAdamW optimizer(params);
  train(optimizer, params, 0, 2);
  Tensors others = copies(params);
  others[0] = params[0].detach().t().clone(at::MemoryFormat::Contiguous).t().requires_grad_();
  ASSERT_NE(others[0].strides(), params[0].strides());
  FusedAdamW other(others);
  load(other, saved(optimizer));
  train(optimizer, params, 2, 4);
  train(other, others, 2, 4);
  EXPECT_TRUE(same(params, others));
}

TEST(FusedAdamWArchive, IsThatOfLibtorchsAdamW) {
  for (const bool amsgrad : {false, true}) {
    const Tensors params = some_params(at::kDouble);
    const Tensors theirs = copies(params);
    torch::optim::AdamW adamw(theirs, torch::optim::AdamWOptions(2e-2).amsgrad(amsgrad));
    FusedAdamW fused(params);
    train(adamw, theirs, 0, 3);
    load(fused, saved(adamw));
    set_weights(params, theirs);
    train(adamw, theirs, 3, 5);
    train(fused, params, 3, 5);
    torch::optim::AdamW back(params);
    load(back, saved(fused));
    train(adamw, theirs, 5, 7);
    train(back, params, 5, 7);
    expect_near(params, theirs);
  }
}

TEST(FusedAdamWArchive, LeavesWhatLibtorchDoesNotSave) {
  const Tensors params = some_params(at::kDouble);
  const Tensors theirs = copies(params);
  torch::optim::Adam adam(theirs, torch::optim::AdamOptions(2e-2).weight_decay(0.2));
  FusedAdamW fused(params, FusedAdamWOptions(1.0).decoupled_weight_decay(false));
  train(adam, theirs, 0, 3);
  fused.param_groups()[0].options().set_lr(-1e-19);  // schedules may end below 0
  train(fused, params, 0, 1);
  load(fused, saved(adam));
  set_weights(params, theirs);
  train(adam, theirs, 3, 5);
  train(fused, params, 3, 5);
  expect_near(params, theirs);
  FusedAdamW rising(params, FusedAdamWOptions().maximize(true));
  load(rising, saved(torch::optim::AdamW(copies(params))));
  EXPECT_TRUE(static_cast<FusedAdamWOptions&>(rising.param_groups()[0].options()).maximize());
  load(rising, saved(FusedAdamW(copies(params))));
  EXPECT_FALSE(static_cast<FusedAdamWOptions&>(rising.param_groups()[0].options()).maximize());
}

// A program may hold a reference to a group's options, as it may with libtorch's optimizers.
TEST(FusedAdamWArchive, LoadsIntoTheGroupsOwnOptions) {
  const Tensors params = some_params();
  FusedAdamW optimizer(params);
  auto& options = static_cast<FusedAdamWOptions&>(optimizer.param_groups()[0].options());
  load(optimizer, saved(FusedAdamW(copies(params), FusedAdamWOptions(0.5))));
  EXPECT_EQ(&options, &optimizer.param_groups()[0].options());
  EXPECT_EQ(options.lr(), 0.5);
}

TEST(FusedAdamWArchive, OfOtherOptimizersIsRefused) {
  const Tensors params = some_params();
  FusedAdamW optimizer(params, FusedAdamWOptions(0.25));
  train(optimizer, params, 0, 1);
  const std::string before = saved(optimizer);
  EXPECT_NE(message_of([&] {
              load(optimizer, saved(torch::optim::SGD(copies(params), 0.7)));
            }).find("the archive has no betas"),
            std::string::npos);
  EXPECT_EQ(saved(optimizer), before);
}

TEST(FusedAdamWArchive, HasStepAndMoments) {
  for (const char* missing : {"step", "exp_avg", "exp_avg_sq"}) {
    torch::serialize::OutputArchive written;
    for (const char* name : {"exp_avg", "exp_avg_sq"}) {
      if (std::string(name) != missing) {
        written.write(name, c10::IValue(torch::ones({3})));
      }
    }
    if (std::string("step") != missing) {
      written.write("step", c10::IValue(int64_t{3}));
    }
    std::stringstream stream;
    written.save_to(stream);
    torch::serialize::InputArchive archive;
    archive.load_from(stream);
    FusedAdamWParamState read;
    EXPECT_EQ(message_of([&] { read.serialize(archive); }),
              std::string("the archive has no ") + missing +
                  ", expected that of an Adam or AdamW optimizer");
  }
}

TEST(FusedAdamWArchive, KeepsItsTensors) {
  const Tensors params = some_params();
  FusedAdamW optimizer(params);
  train(optimizer, params, 0, 1);
  std::istringstream stream(saved(optimizer));
  torch::serialize::InputArchive archive;
  archive.load_from(stream);
  FusedAdamW other(copies(params));
  optimizer.load(archive);
  other.load(archive);
  const std::string before = saved(other);
  train(optimizer, params, 1, 3);
  EXPECT_TRUE(saved(other) == before);
  optimizer.load(archive);
  EXPECT_TRUE(state_of(optimizer, params[0])
                  .exp_avg()
                  .equal(state_of(other, other.param_groups()[0].params()[0]).exp_avg()));
}

// A frozen parameter may be anything, as it is not stepped.
TEST(FusedAdamWArchive, FitsParametersThatRequireAGradient) {
  const Tensors params = some_params();
  FusedAdamW optimizer(params);
  train(optimizer, params, 0, 1);
  const std::string archive = saved(optimizer);
  params[1].mutable_grad() = Tensor();
  params[1].set_data(params[1].detach().to(at::kBFloat16));
  EXPECT_NE(message_of([&] { load(optimizer, archive); }).find("expected bfloat16"),
            std::string::npos);
  params[1].requires_grad_(false);
  load(optimizer, archive);
  optimizer.step();
  EXPECT_EQ(state_of(optimizer, params[0]).step().item<float>(), 2.0F);
}

TEST(FusedAdamWArchive, IsRefusedWhole) {
  const Tensors params = some_params();
  FusedAdamW optimizer(params);
  train(optimizer, params, 0, 1);
  const Tensors others{params[0].detach().clone().requires_grad_(), torch::ones({131}),
                       params[2].detach().clone(), params[3].detach().clone(),
                       params[4].detach().clone()};
  FusedAdamW unlike(others, FusedAdamWOptions(0.5));
  train(unlike, others, 0, 2);
  const std::string before = saved(optimizer);
  EXPECT_NE(message_of([&] {
              load(optimizer, saved(unlike));
            }).find("exp_avg of parameter 1 has shape [131], expected [130]"),
            std::string::npos);
  EXPECT_NE(message_of([&] { load(optimizer, saved(FusedAdamW(Tensors{others[0]}))); }),
            "nothing was raised");
  const Tensors doubles = some_params(at::kDouble);
  torch::optim::AdamW wider(doubles);
  train(wider, doubles, 0, 1);
  EXPECT_NE(message_of([&] { load(optimizer, saved(wider)); }).find("has dtype float64"),
            std::string::npos);
  torch::optim::AdamW earlier(copies(params));
  train(earlier, earlier.param_groups()[0].params(), 0, 1);
  for (const auto& [param, state] : earlier.state()) {
    static_cast<torch::optim::AdamWParamState&>(*state).step(-5);
  }
  EXPECT_NE(message_of([&] { load(optimizer, saved(earlier)); }).find("step is -5"),
            std::string::npos);
  EXPECT_EQ(saved(optimizer), before);
}

}  // namespace
}  // namespace torchopt_ext::test
