// Pass B of a plan with matrices that are orthogonalized (kernels/muon.h). Directions go through a
// buffer, bucket by bucket: one pass averages the momentum and writes the direction, Newton-Schulz
// iterations replace it, NorMuon normalizes its rows, and another pass applies it to the weights.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "work/orthogonalize.h"
#include "work/passes.h"

namespace torchopt_ext {

// A matrix in a tensor: element (i, j) is number first + i * stride + j in storage order.
struct Matrix {
  int64_t first;
  int64_t rows;
  int64_t cols;
  int64_t stride;
  double lr_scale;  // multiplies the learning rate, not the weight decay
};

// How the direction of a tensor is orthogonalized.
struct Orthogonalization {
  std::shared_ptr<const NewtonSchulz> newton_schulz;
  // Of the direction. By default float32 on CPUs, bfloat16 on other devices, and float64 for
  // float64 parameters.
  std::optional<at::ScalarType> dtype;
  std::vector<Matrix> matrices;  // these cover the tensor
};

class OrthogonalUpdate {
 public:
  // `how` has an entry for each tensor of the list, null for those that are updated by element.
  OrthogonalUpdate(const WorkList& work, const std::vector<const Orthogonalization*>& how,
                   at::Device device);

  // As Passes::prepare and Passes::update. `work`: the constructor's list, with this step's
  // gradients.
  void prepare();
  bool is_prepared() const { return workspace_.defined(); }  // for the next update
  void update(const WorkList& work, const std::vector<GroupHyper>& groups,
              const at::Tensor& control, const Traces& traces);

 private:
  // A list with some tensors of the plan, and its own traces.
  struct Pass {
    WorkList work;
    std::vector<size_t> tensors;  // of the plan, by tensor of `work`
    Traces traces;
  };
  // Tensors whose directions are in the buffer at the same time.
  struct Bucket {
    const NewtonSchulz* newton_schulz = nullptr;
    at::ScalarType dtype = at::kFloat;
    int64_t elements = 0;
    Pass average;
    std::vector<int64_t> first;                 // by tensor of `average`: its place in the buffer
    std::vector<std::vector<Matrix>> matrices;  // by the same, in the buffer
    Pass apply;
    std::vector<int64_t> first_applied;  // by tensor of `apply`: its place in the buffer
  };
  void add(const TensorWork& tensor, size_t index, const Orthogonalization& how,
           at::ScalarType dtype);
  void finish(Pass& pass) const;
  void place(Bucket& bucket, const at::Tensor& buffer) const;
  int64_t orthogonalize(const Bucket& bucket, const at::Tensor& buffer) const;
  void normalize(const Bucket& bucket, const std::vector<GroupHyper>& groups,
                 const at::Tensor& buffer, const at::Tensor& skip) const;
  void release();
  void collect_traces(const Traces& traces) const;
  at::Tensor buffer_of(const Bucket& bucket);

  at::Device device_;
  StepOptions options_;
  Pass by_element_;
  std::vector<Bucket> buckets_;
  // The groups of `apply`: a group of the plan with the factor of the learning rate.
  std::vector<std::pair<int32_t, double>> applied_groups_;
  at::Tensor memory_;     // of the buffer; kept between steps, on CUDA devices
  at::Tensor workspace_;  // of the products on a CPU, from prepare() to the end of the step
};

}  // namespace torchopt_ext
