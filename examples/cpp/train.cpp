// Trains a small network to guess the next byte of text files, with FusedAdamW:
//   train FILES...
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/serialize.h>
#include <torchopt_ext/optim.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <sstream>
#include <string>

namespace {

constexpr int64_t kContext = 16;  // bytes that the network sees
constexpr int64_t kWidth = 32;    // of a byte's embedding
constexpr int64_t kBatch = 256;
constexpr int64_t kSteps = 300;
constexpr double kLearningRate = 3e-3;

torch::Tensor read_bytes(int count, char** files) {
  std::string text;
  for (int i = 0; i < count; ++i) {
    std::ifstream file(files[i], std::ios::binary);
    if (!file) {
      throw std::runtime_error(std::string("cannot read ") + files[i]);
    }
    text.append(std::istreambuf_iterator<char>(file), {});
  }
  if (text.size() < 10000) {
    throw std::runtime_error("the files have " + std::to_string(text.size()) +
                             " bytes together, expected at least 10,000");
  }
  return torch::from_blob(text.data(), {static_cast<int64_t>(text.size())}, torch::kUInt8).clone();
}

torch::nn::Sequential make_network() {
  namespace nn = torch::nn;
  return nn::Sequential(nn::Embedding(256, kWidth), nn::Flatten(),
                        nn::Linear(kContext * kWidth, 256), nn::GELU(), nn::Linear(256, 256));
}

// Matrices decay; biases do not.
torchopt_ext::FusedAdamW make_optimizer(torch::nn::Module& network) {
  std::vector<torch::Tensor> matrices;
  std::vector<torch::Tensor> biases;
  for (const torch::Tensor& param : network.parameters()) {
    (param.dim() > 1 ? matrices : biases).push_back(param);
  }
  using Options = torchopt_ext::FusedAdamWOptions;
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(matrices);
  groups.emplace_back(biases, std::make_unique<Options>(Options().weight_decay(0.0)));
  torchopt_ext::FusedAdamW optimizer(groups, Options(kLearningRate).weight_decay(0.1));
  optimizer.max_grad_norm(1.0).skip_nonfinite(true);
  return optimizer;
}

// The loss of guessing what follows random places of the text.
torch::Tensor loss_on(torch::nn::Sequential& network, const torch::Tensor& text) {
  const auto places = torch::randint(text.numel() - kContext, {kBatch}, torch::kLong);
  const auto offsets = torch::arange(kContext + 1, torch::kLong);
  const auto bytes = text.index({places.unsqueeze(1) + offsets}).to(torch::kLong);
  const auto guesses = network->forward(bytes.slice(1, 0, kContext));
  return torch::nn::functional::cross_entropy(guesses, bytes.select(1, kContext));
}

int train(int count, char** files) {
  torch::manual_seed(0);
  const torch::Tensor text = read_bytes(count, files);
  torch::nn::Sequential network = make_network();
  torchopt_ext::FusedAdamW optimizer = make_optimizer(*network);
  const torchopt_ext::LRSchedule schedule{
      .warmup_steps = 20, .decay_steps = kSteps - 20, .decay_type = "cosine"};
  std::cout << text.numel() << " bytes of text\n";
  for (int64_t step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const torch::Tensor loss = loss_on(network, text);
    loss.backward();
    for (auto& group : optimizer.param_groups()) {
      group.options().set_lr(kLearningRate * torchopt_ext::lr_factor(step, schedule));
    }
    optimizer.step();
    if (step % 50 == 0 || step + 1 == kSteps) {
      std::cout << "step " << step << ": loss " << loss.item<double>() << ", gradient norm "
                << optimizer.grad_norm().item<double>() << "\n";
    }
  }

  // An optimizer that is saved and loaded goes on as if nothing had happened.
  std::stringstream archive;
  torch::save(optimizer, archive);
  torchopt_ext::FusedAdamW resumed = make_optimizer(*network);
  torch::load(resumed, archive);
  std::cout << "skipped steps: " << optimizer.skipped_steps().item<double>()
            << "; saved and loaded the state of " << resumed.state().size() << " parameters\n";
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::cerr << "usage: train FILES...\n";
    return 2;
  }
  try {
    return train(argc - 1, argv + 1);
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
