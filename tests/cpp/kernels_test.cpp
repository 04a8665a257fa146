// The bitwise contract of pass B: every instruction set's kernels and the bodies of the CUDA
// kernels give the same bits for all dtypes of parameter and state, wherever arrays start.
#include <gtest/gtest.h>

#include <algorithm>

#include "step_support.h"

namespace torchopt_ext {
namespace {

// Compares all kernels with the CPU's scalar kernels, on a tensor of the case.
void expect_same_bits(const Tensor& start, const Case& c, int variant) {
  const Group hyper = hyper_of(variant, c.algorithm);
  Control control = control_of_a_step();
  control.ema_weight = variant % 3 == 0 ? 0.7 : 0.1;
  Tensor expected = start;
  const Report expected_report = step_on_cpu(default_kernels(), expected, hyper, control);
  ASSERT_FALSE(expected.same_bits(start)) << describe(c);
  for (const KernelTable* table : runnable_tables()) {
    for (const int64_t chunk : {int64_t{4096}, kChunkElements}) {
      if (c.options.track != 0 && chunk != kChunkElements) {
        continue;  // a trace depends on the chunks
      }
      for (const bool past_caches : {false, true}) {
        Tensor actual = start;
        const Report report = step_on_cpu(*table, actual, hyper, control, chunk, past_caches);
        ASSERT_TRUE(actual.same_bits(expected)) << table->name << " " << describe(c);
        ASSERT_TRUE(report.same_bits(expected_report)) << table->name << " " << describe(c);
      }
    }
  }
  for (const int threads : {32, 256}) {
    Tensor actual = start;
    const Report report =
        step_as_cuda(actual, hyper, control, threads, threads == 32 ? 1000 : 4096);
    ASSERT_TRUE(actual.same_bits(expected)) << threads << " CUDA threads " << describe(c);
    ASSERT_TRUE(report.same_bits(expected_report)) << threads << " CUDA threads " << describe(c);
  }
}

void expect_same_bits(const Case& c, int variant) { expect_same_bits(Tensor(c), c, variant); }

class Every : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Algorithms, Every, testing::Range(0, kAlgorithms));

TEST_P(Every, SameBitsHoweverAStepIsMade) {
  int variant = 0;
  for (Case c : every_way_to_hold()) {
    c.algorithm = Algorithm{GetParam()};
    if (declaration_of(c.algorithm).writes_direction && c.layout.master != Master::kNone) {
      continue;  // a direction has no master
    }
    const uint32_t required = required_states(c.algorithm);
    const uint32_t all_states =
        states_that(c.algorithm, [](const StateSpec& state) { return !state.by_row; });
    const uint32_t moments =
        states_that(c.algorithm, [](const StateSpec& state) { return state.is_moment; });
    const bool some_optional = all_states != required;
    for (int options = 0; options < 16; ++options) {
      if ((options & 1) != 0 && !some_optional) {
        continue;
      }
      c.layout.states = (options & 1) != 0 ? all_states : 0;
      c.options.stochastic_rounding = (options & 2) != 0;
      c.options.write_back_gradients = (options & 4) != 0;
      c.options.track = (options & 8) != 0 ? 3u : 0u;
      c.options.rounding_seed = 11;
      if (c.layout.state == DType::kInt8 && (c.layout.states | required) != moments) {
        continue;  // no such state of 8 bits, or none at all
      }
      for (int64_t numel : {1, 31, 513, 640, 4700}) {  // 640: whole groups
        ++variant;
        if (numel == 4700 && variant % 8 != 0) {
          numel = 1100;  // several chunks of 32 threads only: more take most of this test's time
        }
        c.row_length = numel;
        c.seed = static_cast<unsigned>(variant);
        c.averages = variant % 2 == 0 && !declaration_of(c.algorithm).writes_direction;
        c.ema = variant % 4 == 0 ? DType::kBFloat16 : DType::kFloat32;
        for (size_t a = 0; a < c.offsets.size(); ++a) {
          c.offsets[a] = variant % 3 == 0 ? 0 : variant * static_cast<int64_t>(a + 1) % 16;
        }
        expect_same_bits(c, variant);
        if (HasFatalFailure()) {
          return;
        }
      }
    }
  }
}

TEST(Adam, SameBitsWhereverArraysStart) {
  constexpr uint32_t kOneTracked[] = {0, 1, 2};
  const Case ways[] = {{},
                       {.layout = kTraits<AdamKind::kFloat64>.layout},
                       {.layout = kTraits<AdamKind::kBFloat16Remainder>.layout},
                       {.layout = {.param = DType::kFloat16, .master = Master::kFloat32}},
                       {.layout = kTraits<AdamKind::kBFloat16Master>.layout},
                       {.layout = kTraits<AdamKind::kBFloat16>.layout},
                       {.layout = kTraits<AdamKind::kInt8Float32>.layout},
                       {.layout = kTraits<AdamKind::kInt8BFloat16>.layout},
                       {.layout = kTraits<AdamKind::kInt8Remainder8>.layout}};
  for (Case c : ways) {
    c.layout.states = c.layout.state != DType::kInt8 ? 7 : 0;
    for (const int64_t numel : {3, 45, 100}) {
      c.row_length = numel;
      for (int64_t offset = 0; offset < 16; ++offset) {
        for (size_t moved = 0; moved <= c.offsets.size(); ++moved) {
          for (size_t a = 0; a < c.offsets.size(); ++a) {  // one array alone, or all
            c.offsets[a] = moved == a || moved == c.offsets.size() ? offset : 0;
          }
          // With all that can be tracked, and with one choice after the other.
          const uint32_t one_tracked = kOneTracked[(static_cast<size_t>(offset) + moved) % 3];
          for (const uint32_t track : {uint32_t{3}, one_tracked}) {
            c.options.track = track;
            expect_same_bits(c, 1);
            if (HasFatalFailure()) {
              return;
            }
          }
        }
      }
    }
  }
}

TEST(Adam, SameBitsOverManyChunks) {
  for (const uint32_t track : {0u, 3u}) {
    Case c{.layout = kTraits<AdamKind::kBFloat16Remainder>.layout};
    c.rows = 35;
    c.row_length = 1999;
    c.options.track = track;
    expect_same_bits(c, 2);
    expect_same_bits({.options = {.track = track}, .rows = 35, .row_length = 1999}, 2);
    c.layout.state = DType::kInt8;  // groups end with their rows
    expect_same_bits(c, 2);
    c.row_length = 150;                                    // three groups: tiles end within rows
    c.first_element = (int64_t{1} << kStreamBits) - 1530;  // a stream ends within a group
    expect_same_bits(c, 2);
    c.rows = 3;
    c.row_length = 40960;  // several chunks a row
    c.options.stochastic_rounding = true;
    expect_same_bits(c, 2);
  }
}

TEST(Adam, SameBitsOf8BitMomentsAroundInfinitiesAndNaNs) {
  constexpr float kValues[] = {NAN, -NAN, INFINITY, -INFINITY, 0x1p100f, -0x1p100f, 0x1p-140f};
  std::minstd_rand random(1);
  const auto spoil = [&](Tensor& tensor, Array array, int64_t n, unsigned one_in) {
    for (int64_t i = 0; i < n; ++i) {
      if (random() % one_in == 0) {
        const float value = kValues[random() % std::size(kValues)];
        const uint32_t upper = bit_cast<uint32_t>(value) >> 16;  // is the value, or a bf16
        const auto size = static_cast<size_t>(tensor.size(array));
        unsigned char* const to = &tensor.memory(array)[static_cast<size_t>(i) * size];
        std::memcpy(to + size - 2, &upper, 2);
      }
    }
  };
  for (const Case& way : every_way_to_hold()) {
    if (way.layout.state != DType::kInt8 || way.layout.grad == DType::kFloat16) {
      continue;
    }
    for (int variant = 0; variant < 24; ++variant) {
      Case c = way;
      c.row_length = 1152;
      c.seed = static_cast<unsigned>(variant);
      Tensor start(c);
      spoil(start, kGrad, c.row_length, variant % 2 == 0 ? 20 : 100);
      for (int moment = 0; moment < variant % 3; ++moment) {
        spoil(start, scale_array(moment), c.row_length / kQuantGroup, 4);
      }
      expect_same_bits(start, c, variant);
      if (HasFatalFailure()) {
        return;
      }
    }
  }
}

TEST(Adam, ASkippedStepChangesNothingInTheCudaBody) {
  Control control = control_of_a_step();
  control.skip = 1.0;
  for (const uint32_t track : {0u, 1u, 2u, 3u}) {
    Tensor tensor(
        {.layout = {.states = 7}, .options = {.track = track}, .rows = 3, .row_length = 700});
    const Tensor start = tensor;
    const Report report = step_as_cuda(tensor, hyper_of(1), control, 256);
    EXPECT_TRUE(tensor.same_bits(start));
    EXPECT_EQ(report.lost, 0);
  }
}

// The only update is a decay too small for bf16, so every element loses its update.
TEST(Adam, LostUpdatesAreCounted) {
  Case c{.layout = {.param = DType::kBFloat16, .grad = DType::kBFloat16}};
  c.options.track = kTrackLost;
  c.row_length = 600;
  Group hyper = hyper_of(1);
  hyper.hyper.value[kWeightDecay] = 0.01;
  Tensor start(c);
  for (const Array array : {kGrad, kExpAvg, kExpAvgSq}) {
    std::fill(start.memory(array).begin(), start.memory(array).end(), '\0');
  }
  Tensor on_cpu = start;
  Tensor as_cuda = start;
  EXPECT_EQ(step_on_cpu(kernels(), on_cpu, hyper, control_of_a_step()).lost, 600);
  EXPECT_EQ(step_as_cuda(as_cuda, hyper, control_of_a_step(), 256).lost, 600);
  EXPECT_EQ(on_cpu.memory(kParam), start.memory(kParam));
}

TEST(Adam, NormsThatAreNaNHaveOneForm) {
  for (const Kind kind : {AdamKind::kFloat32, AdamKind::kFloat64, AdamKind::kBFloat16}) {
    Case c{.layout = traits_of(kind).layout, .options = {.track = kTrackNorms}, .row_length = 600};
    Tensor start(c);
    std::vector<unsigned char>& gradient = start.memory(kGrad);
    const auto size = static_cast<size_t>(start.size(kGrad));
    for (const size_t i : {5, 8, 69}) {  // in one lane and in one register, with different signs
      std::fill_n(gradient.begin() + static_cast<int64_t>(size * i), size, i == 8 ? 0x7f : 0xff);
    }
    const auto expect = [&](const Report& report) {
      for (const double norm : report.norms) {
        EXPECT_EQ(bit_cast<uint64_t>(norm), bit_cast<uint64_t>(canonical_nan(0.0)));
      }
    };
    for (const KernelTable* table : runnable_tables()) {
      Tensor tensor = start;
      expect(step_on_cpu(*table, tensor, hyper_of(1), control_of_a_step()));
    }
    Tensor tensor = start;
    expect(step_as_cuda(tensor, hyper_of(1), control_of_a_step(), 256));
  }
}

TEST(Adam, LostUpdatesAreCountedAroundZerosInfinitiesAndNaNs) {
  const float values[] = {0.0f, -0.0f, 1.0f, -0x1p-149f, 0x1p127f, INFINITY, -INFINITY, NAN};
  std::vector<float> params;
  std::vector<float> exp_avgs;
  for (const float param : values) {
    for (const float exp_avg : values) {
      params.push_back(param);
      exp_avgs.push_back(exp_avg);
    }
  }
  for (const bool decays : {false, true}) {
    // Moments stay unchanged, and weights where 0 times the moment is 0.
    TensorScalars scalars{};
    scalars.as_float.flag[Adam::kSmallW1] = scalars.as_float.flag[Adam::kSmallW2] = true;
    scalars.as_float.value[Adam::kEpsHat] = 1.0f;
    scalars.as_float.has_decay = decays;
    for (const KernelTable* table : runnable_tables()) {
      int64_t expected = 0;
      int64_t lost = 0;
      for (size_t first = 0; first < params.size(); first += 8) {  // the next 8, and all the rest
        for (const size_t n : {size_t{8}, params.size() - first}) {
          std::vector<float> p(params.begin() + first, params.begin() + first + n);
          std::vector<float> m(exp_avgs.begin() + first, exp_avgs.begin() + first + n);
          std::vector<float> g = m;  // so that m + 0 * (g - m) is m, or a NaN
          std::vector<float> v(n);
          std::vector<float> change(n);
          const std::vector<float> before = p;
          TensorWork work = work_of({}, p.data());
          work.memory[kGrad] = g.data();
          work.memory[kExpAvg] = m.data();
          work.memory[kExpAvgSq] = v.data();
          lost += table->update[0](scalars, work, {}, 0, static_cast<int64_t>(n), change.data());
          for (size_t i = 0; i < n; ++i) {
            const bool moves = m[i] != 0.0f || (decays && before[i] != 0.0f);
            expected += p[i] == before[i] && moves ? 1 : 0;
            const float difference = p[i] - before[i];
            ASSERT_TRUE(change[i] == difference ||
                        (std::isnan(change[i]) && std::isnan(difference)));
          }
        }
      }
      EXPECT_EQ(lost, expected) << table->name;
      EXPECT_GT(lost, 0);
    }
  }
}

TEST(Adam, ACudaLaunchPreparesItsRangesOfTensorsAndGroups) {
  float counts[4] = {3.0f, 3.0f, 3.0f, 3.0f};
  float gradient = 0.0f;
  TensorWork tensors[4] = {};
  for (int i = 0; i < 4; ++i) {
    tensors[i].memory[kStep] = counts + i;
    tensors[i].group = i == 2 ? 0 : 1;
  }
  Control control = control_of_a_step();
  TensorStep steps[4] = {};
  UpdateArgs args{};
  args.tensors = tensors;
  args.steps = steps;
  args.control = &control;
  const PrepareKernel<3> prepare{
      {},
      {1, 3, {&gradient, &gradient, nullptr}},
      {1, 1, {{kNumberOf<Adam>, hyper_of(1).hyper, nullptr, DType::kFloat64}}},
      args};
  run_on_host(prepare, 1);
  EXPECT_TRUE(std::ranges::equal(counts, std::array{3.0f, 4.0f, 3.0f, 3.0f}));
  EXPECT_EQ(steps[0].grad, nullptr);
  EXPECT_EQ(steps[1].grad, &gradient);
  EXPECT_EQ(steps[2].grad, nullptr);  // its group belongs to another launch
  EXPECT_EQ(steps[3].grad, nullptr);  // no gradient
  EXPECT_EQ(steps[1].scalars.as_float.value[Adam::kKeeps1],
            static_cast<float>(hyper_of(1).hyper[Adam::kBeta1]));
  control.skip = 1.0;
  run_on_host(prepare, 1);
  EXPECT_EQ(steps[1].grad, nullptr);
  EXPECT_EQ(counts[1], 4.0f);
}

TEST(Adam, ALearningRateOnTheDeviceReplacesTheNumber) {
  const float single = 0.125f;
  const double exact = 0.1;
  EXPECT_EQ(learning_rate({kNumberOf<Adam>, hyper_of(1).hyper, nullptr, DType::kFloat64}), 1e-2);
  EXPECT_EQ(learning_rate({kNumberOf<Adam>, hyper_of(1).hyper, &single, DType::kFloat32}), 0.125);
  EXPECT_EQ(learning_rate({kNumberOf<Adam>, hyper_of(1).hyper, &exact, DType::kFloat64}), 0.1);
}

}  // namespace
}  // namespace torchopt_ext
