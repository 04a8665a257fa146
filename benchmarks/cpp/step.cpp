// Times a clipped AdamW step from C++, ours and libtorch's: `make bench-cxx`, half a minute, 5 GB.
//
// libtorch: torch::nn::utils::clip_grad_norm_, then torch::optim::AdamW, neither of them fused.
// Ours: torchopt_ext::FusedAdamW with max_grad_norm. Both run in turn, in an order that alternates.
// The ratio is the median over pairs, because the machine's speed changes meanwhile.
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/version.h>
#include <torchopt_ext/optim.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

namespace {

using Shapes = std::vector<std::vector<int64_t>>;

// The parameters of GPT-2 with tied embeddings, as in benchmarks/shapes.py.
Shapes gpt2(int64_t vocabulary, int64_t context, int64_t width, int layers) {
  Shapes shapes{{vocabulary, width}, {context, width}};
  for (int layer = 0; layer < layers; ++layer) {
    const int64_t w = width;
    const Shapes block{{w},        {w},                        // layer norm
                       {w, 3 * w}, {3 * w}, {w, w},     {w},   // attention
                       {w},        {w},                        // layer norm
                       {w, 4 * w}, {4 * w}, {4 * w, w}, {w}};  // perceptron
    shapes.insert(shapes.end(), block.begin(), block.end());
  }
  shapes.insert(shapes.end(), {{width}, {width}});
  return shapes;
}

std::vector<at::Tensor> parameters(const Shapes& shapes) {
  torch::manual_seed(0);
  std::vector<at::Tensor> params;
  for (const std::vector<int64_t>& shape : shapes) {
    params.push_back(torch::randn(shape).requires_grad_());
    params.back().mutable_grad() = torch::randn(shape);
  }
  return params;
}

double milliseconds(const std::function<void()>& call, int calls) {
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < calls; ++i) {
    call();
  }
  const std::chrono::duration<double, std::milli> spent = std::chrono::steady_clock::now() - start;
  return spent.count() / calls;
}

double quantile(std::vector<double> samples, double q) {
  std::sort(samples.begin(), samples.end());
  return samples[static_cast<size_t>(q * static_cast<double>(samples.size() - 1) + 0.5)];
}

void print_row(const char* name, const std::vector<double>& ms) {
  std::printf("  %-36s %3zu %10.3f %10.3f %10.3f\n", name, ms.size(), quantile(ms, 0.5),
              quantile(ms, 0.25), quantile(ms, 0.75));
}

void compare(const char* name, const Shapes& shapes, double target, int rounds, int calls) {
  const std::vector<at::Tensor> theirs = parameters(shapes);
  const std::vector<at::Tensor> ours = parameters(shapes);
  torch::optim::AdamW adamw(theirs, torch::optim::AdamWOptions(1e-4));
  torchopt_ext::FusedAdamW fused(ours, torchopt_ext::FusedAdamWOptions(1e-4));
  fused.max_grad_norm(1.0);
  const std::function<void()> cases[] = {[&] {
                                           torch::nn::utils::clip_grad_norm_(theirs, 1.0);
                                           adamw.step();
                                         },
                                         [&] { fused.step(); }};
  std::vector<double> samples[2];
  for (int round = -1; round < rounds; ++round) {  // the first round makes state and plans
    for (int i = 0; i < 2; ++i) {
      const int which = round % 2 == 0 ? i : 1 - i;
      cases[which]();  // fills the caches, as the same step before it would
      const double ms = milliseconds(cases[which], calls);
      if (round >= 0) {
        samples[which].push_back(ms);
      }
    }
  }
  std::vector<double> ratios;
  for (int round = 0; round < rounds; ++round) {
    ratios.push_back(samples[0][static_cast<size_t>(round)] /
                     samples[1][static_cast<size_t>(round)]);
  }
  std::printf("%s, fp32\n", name);
  print_row("libtorch clip_grad_norm_, AdamW", samples[0]);
  print_row("torchopt_ext FusedAdamW", samples[1]);
  const double times = quantile(ratios, 0.5);
  std::printf("  times as fast: %.1f (quartiles %.1f to %.1f); target %.0f: %s\n\n", times,
              quantile(ratios, 0.25), quantile(ratios, 0.75), target,
              times >= target ? "met" : "not met");
}

std::string processor() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) {
      return line.substr(line.find(':') + 2);
    }
  }
  return "unknown processor";
}

}  // namespace

int main(int argc, char** argv) {
  const bool quick = argc == 2 && std::strcmp(argv[1], "--quick") == 0;
  if (argc > 1 && !quick) {
    std::fprintf(stderr, "usage: bench_cxx [--quick]\n");
    return 2;
  }
  std::printf("torch %s, g++ %s, %s, %d threads of %s\n", TORCH_VERSION, __VERSION__,
              at::get_cpu_capability().c_str(), at::get_num_threads(), processor().c_str());
  std::string load;
  std::getline(std::ifstream("/proc/loadavg"), load);
  std::printf("load average at the start: %s\n\n", load.c_str());
  std::printf("  %-36s %3s %10s %10s %10s\n", "", "n", "ms", "quartile", "quartile");
  if (quick) {
    compare("200 of 100", Shapes(200, {100}), 10.0, 4, 2);
    compare("GPT-2 in small", gpt2(500, 32, 48, 2), 4.0, 4, 2);
    return 0;
  }
  compare("2,000 of 1,000", Shapes(2000, {1000}), 10.0, 30, 5);
  compare("GPT-2 124 M", gpt2(50257, 1024, 768, 12), 4.0, 12, 1);
}
