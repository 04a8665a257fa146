// Compares 16-bit conversions with c10's, over all 16-bit values and floats around every rounding
// boundary, in the scalar header and in each instruction set's kernels.
#include "kernels/dtype.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <gtest/gtest.h>

#include <cmath>

#include "support.h"

namespace torchopt_ext {
namespace {

template <class Ours, class Theirs>
void widen_agrees() {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const float theirs = static_cast<float>(Theirs(half, Theirs::from_bits()));
    const float ours = widen(Ours{half});
    if (std::isnan(theirs)) {
      ASSERT_TRUE(std::isnan(ours)) << bits;
    } else {
      ASSERT_EQ(bit_cast<uint32_t>(ours), bit_cast<uint32_t>(theirs)) << bits;
    }
  }
}

// Returns all 16-bit values, the midpoints between neighbors, and two floats on each side of both.
template <class Ours>
std::vector<float> boundary_floats() {
  std::vector<float> values;
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float value = widen(Ours{static_cast<uint16_t>(bits)});
    if (std::isnan(value)) {
      continue;
    }
    const auto below = static_cast<uint16_t>((bits & 0x7fff) == 0 ? bits : bits - 1);
    const float middle = value / 2 + widen(Ours{below}) / 2;
    for (const float center : {value, middle}) {
      const auto pattern = bit_cast<uint32_t>(center);
      for (uint32_t offset = 0; offset <= 4; ++offset) {
        const float near = bit_cast<float>(pattern + offset - 2);
        if (!std::isnan(near)) {
          values.push_back(near);
        }
      }
    }
  }
  values.push_back(canonical_nan(0.0f));
  return values;
}

template <class Ours, class Theirs>
void narrow_agrees(DType dtype) {
  const std::vector<float> values = boundary_floats<Ours>();
  for (const KernelTable* table : runnable_tables()) {
    std::vector<float> master = values;
    std::vector<uint16_t> converted(values.size());
    subtract(*table,
             work_of({.param = dtype, .master = Master::kFloat32}, converted.data(), master.data()),
             std::vector<float>(values.size()));
    for (size_t i = 0; i < values.size(); ++i) {
      const uint16_t scalar = narrow<Ours>(values[i]).bits;
      ASSERT_EQ(converted[i], scalar) << table->name << " " << values[i];
      if (!std::isnan(values[i])) {
        ASSERT_EQ(scalar, Theirs(values[i]).x) << values[i];
      }
    }
  }
  EXPECT_EQ(narrow<Ours>(canonical_nan(0.0f)).bits, dtype == DType::kFloat16 ? 0x7e00 : 0x7fc0);
}

TEST(DType, WidenIsExact) {
  widen_agrees<Float16, c10::Half>();
  widen_agrees<BFloat16, c10::BFloat16>();
}

TEST(DType, KernelsWidenAsTheHeaderDoes) {
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) {
    all[i] = static_cast<uint16_t>(i);
  }
  std::vector<float> wide(all.size());
  for (const KernelTable* table : runnable_tables()) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      const auto& to_float = table->scaled_copy[static_cast<int>(DType::kFloat32)];
      to_float[static_cast<int>(dtype)](wide.data(), all.data(), 1.0, 65536, false);
      for (size_t i = 0; i < all.size(); ++i) {
        const float value =
            dtype == DType::kBFloat16 ? widen(BFloat16{all[i]}) : widen(Float16{all[i]});
        ASSERT_EQ(bit_cast<uint32_t>(wide[i]),
                  bit_cast<uint32_t>(ScalarLane<float>::canonical(value)))
            << table->name << " " << i;
      }
    }
  }
}

TEST(DType, NarrowRoundsToNearestEven) {
  narrow_agrees<Float16, c10::Half>(DType::kFloat16);
  narrow_agrees<BFloat16, c10::BFloat16>(DType::kBFloat16);
}

}  // namespace
}  // namespace torchopt_ext
