// The code of docs/cpp.md compiles: block_*.inc are its blocks.
#include <torch/nn/modules/linear.h>
#include <torchopt_ext/optim.h>

#include <iostream>

torch::Tensor loss(const torch::nn::Linear& model, const torch::Tensor& batch);

void documented(torch::nn::Linear model, const std::vector<torch::Tensor>* loader, int64_t kSteps) {
#include "block_0.inc"
#include "block_1.inc"
}
