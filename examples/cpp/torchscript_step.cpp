// Runs what examples/torchscript_step.py saved, without Python. The operators are in
// libtorchopt_ext.so, which the program is linked to.
#include <torch/script.h>

#include <iostream>

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: torchscript_step step.pt\n";
    return 2;
  }
  torch::jit::Module step = torch::jit::load(argv[1]);
  c10::List<at::Tensor> params({torch::ones({3, 4}), torch::ones({5})});
  c10::List<at::Tensor> exp_avgs({torch::zeros({3, 4}), torch::zeros({5})});
  c10::List<at::Tensor> exp_avg_sqs({torch::zeros({3, 4}), torch::zeros({5})});
  c10::List<at::Tensor> counts({torch::zeros({}), torch::zeros({})});
  for (int64_t i = 0; i < 10; ++i) {
    c10::List<at::Tensor> grads;
    for (const at::Tensor& param : params) {
      grads.push_back(2 * param);
    }
    const auto norm = step.forward({params, grads, exp_avgs, exp_avg_sqs, counts, i}).toTensor();
    std::cout << "step " << i << ": gradient norm " << norm.item<double>() << "\n";
  }
}
