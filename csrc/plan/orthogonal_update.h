// Pass B of a plan with matrices that are orthogonalized (kernels/muon.h). Directions go through a
// buffer, bucket by bucket: one pass averages the momentum and writes the direction, Newton-Schulz
// iterations replace it, NorMuon normalizes its rows, and another pass applies it to the weights.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "plan/matrices.h"
#include "plan/staged_update.h"
#include "work/passes.h"

namespace torchopt_ext {

// How the direction of a tensor is orthogonalized.
struct Orthogonalization {
  std::shared_ptr<const NewtonSchulz> newton_schulz;
  // Of the direction. By default float32 on CPUs, bfloat16 on other devices, and float64 for
  // float64 parameters.
  std::optional<at::ScalarType> dtype;
  std::vector<Matrix> matrices;  // these cover the tensor
  // The number of the exchange in which ranks orthogonalize matrices of which the tensor is a part.
  // `matrices` are then its rows with the learning rates of their matrices. -1: it has whole ones.
  int64_t exchange = -1;
  int64_t averages = 0;  // rows of which this rank holds NorMuon's average
};

// What ranks exchange of a tensor: its direction, for NorMuon a copy of the averages of its rows,
// and beta2. The exchange puts the results into both.
using Direction = std::tuple<at::Tensor, std::optional<at::Tensor>, double>;

// The stages of exchanges 0, 1, ... of a step. average(k) returns the directions of the tensors of
// exchange k, in the order of the plan, none for those without a gradient; apply(k) applies them,
// and keeps the averages. At most kInFlight exchanges have directions: apply(k) comes before
// average(k + kInFlight).
struct ExchangeStages {
  static constexpr int64_t kInFlight = 3;
  std::function<std::vector<std::optional<Direction>>(int64_t)> average;
  std::function<void(int64_t)> apply;
};
// Orthogonalizes the directions of all exchanges with other ranks; returns the number of matrices.
using Exchange = std::function<int64_t(const ExchangeStages&)>;

class OrthogonalUpdate {
 public:
  // `how` has an entry for each tensor of the list, null for those that are updated by element,
  // whose states on the host are staged if there is a ring.
  OrthogonalUpdate(const WorkList& work, const std::vector<const Orthogonalization*>& how,
                   at::Device device, std::shared_ptr<StagingRing> ring = nullptr);

  // As Passes::prepare and Passes::update. `work`: the constructor's list, with this step's
  // gradients.
  void prepare();
  bool is_prepared() const { return workspace_.defined(); }  // for the next update
  bool exchanges() const { return first_exchange_ < buckets_.size(); }
  void update(const WorkList& work, const std::vector<GroupHyper>& groups,
              const at::Tensor& control, const Traces& traces, const Exchange& exchange);

 private:
  // A list with some tensors of the plan, and its own traces.
  struct Pass {
    WorkList work;
    std::vector<size_t> tensors;  // of the plan, by tensor of `work`
    Traces traces;
    at::Tensor rows;  // `tensors` on the device, if there are traces: a step copies nothing there
  };
  // Tensors whose directions are in the buffer at the same time.
  struct Bucket {
    const NewtonSchulz* newton_schulz = nullptr;
    at::ScalarType dtype = at::kFloat;
    int64_t elements = 0;
    int64_t slot = 0;  // of memory_
    Pass average;
    std::vector<int64_t> first;                 // by tensor of `average`: its place in the buffer
    std::vector<std::vector<Matrix>> matrices;  // by the same, in the buffer
    std::vector<int64_t> averages;              // by the same: of rows
    std::vector<at::Tensor> new_averages;       // by the same, while ranks exchange them
    Pass apply;
    std::vector<int64_t> first_applied;  // by tensor of `apply`: its place in the buffer
  };
  Bucket& bucket_for(const TensorWork& tensor, const Orthogonalization& how, at::ScalarType dtype);
  Bucket& new_bucket(const Orthogonalization& how, at::ScalarType dtype);
  void add(Bucket& bucket, const TensorWork& tensor, size_t index, const Orthogonalization& how);
  at::Tensor averages_of(const Bucket& bucket, size_t k) const;
  std::vector<std::optional<Direction>> directions(Bucket& bucket,
                                                   const std::vector<GroupHyper>& groups,
                                                   const at::Tensor& buffer) const;
  void keep_averages(Bucket& bucket, const at::Tensor& skip) const;
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
  StagedUpdate staged_;          // of by_element_
  std::vector<Bucket> buckets_;  // from first_exchange_ on those of exchanges 0, 1, ...
  size_t first_exchange_ = 0;
  // The groups of `apply`: a group of the plan with the factor of the learning rate.
  std::vector<std::pair<int32_t, double>> applied_groups_;
  // Of the buffers; kept between steps, on CUDA devices.
  std::array<at::Tensor, ExchangeStages::kInFlight> memory_;
  at::Tensor workspace_;  // of the products on a CPU, from prepare() to the end of the step
};

}  // namespace torchopt_ext
