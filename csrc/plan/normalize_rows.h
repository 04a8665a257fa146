// NorMuon's second stage (arXiv:2510.05491): the rows of an orthogonalized matrix are divided by
// the root of a moving average of their mean squares, and the whole is scaled to the Frobenius norm
// that it had, as dion does (dion/normuon.py), so that learning rates are those of Muon.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "plan/matrices.h"

namespace torchopt_ext {

// The averages of rows, one after another, and how much of them a step keeps.
struct RowMoments {
  float* second_momentum;
  double beta2;
};

// Normalizes matrices of a flat buffer, which are blocks of whole rows, in place, and averages
// their rows' mean squares. On CPUs on all threads, with bits that depend on neither threads nor
// instructions. On other devices a step whose `skip`, a float64 scalar, is not 0 leaves the
// averages as they are.
void normalize_rows(const at::Tensor& buffer, const std::vector<Matrix>& matrices,
                    RowMoments moments, const at::Tensor& skip = {});

}  // namespace torchopt_ext
