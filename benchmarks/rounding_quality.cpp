// Statistical tests of the draws of stochastic rounding (csrc/kernels/stochastic.h). The program
// prints each test's largest deviation, in standard deviations and as a share. It fails if a share
// is above kMost, which would show in a mean over ten million elements.
//
//   make rounding-quality DRAWS=1e10
//
// A deviation's share is its distance from the value for independent uniform bits, divided by the
// largest possible distance: 1 for a bit that is always set, or for two equal sequences.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "kernels/stochastic.h"

namespace torchopt_ext {
namespace {

constexpr double kMost = 1e-3;
constexpr int kBlock = 4096;

struct Element {
  RoundingKey key{7, 1, 0};
  uint64_t first = 12345;
  uint32_t flipped = 0;  // bits that are flipped in the element's number
};

struct Words {
  uint32_t word[2][kBlock];
};

void draw(const Element& of, uint64_t block, Words& to) {
  RoundingStream stream{};
  for (uint32_t j = 0; j < kBlock; ++j) {
    const uint64_t element = (of.first + block * kBlock + j) ^ of.flipped;
    if (j == 0 || element % (1u << kStreamBits) == 0) {
      stream = rounding_stream(of.key, element);
    }
    const RandomWords<ScalarWords> words =
        random_words<ScalarWords>(stream, static_cast<uint32_t>(element));
    to.word[0][j] = words.word[0];
    to.word[1][j] = words.word[1];
  }
}

struct Deviation {
  double sigmas = 0.0;
  double share = 0.0;
  void add(double mean_share, double count) {
    share = std::max(share, std::fabs(mean_share));
    sigmas = std::max(sigmas, std::fabs(mean_share) * std::sqrt(count));
  }
};

// Tests how often bits of two sequences agree, and the correlation of their 16-bit halves. If
// `other` is null, tests the bits of `one` alone. `crossed` compares first words with second words.
Deviation compare(const Element& one, const Element* other, bool crossed, uint64_t blocks) {
  std::vector<uint64_t> ones(64, 0);
  double products[4] = {};
  static Words a;
  static Words b;
  for (uint64_t block = 0; block < blocks; ++block) {
    draw(one, block, a);
    if (other != nullptr) {
      draw(*other, block, b);
    } else {
      std::fill(&b.word[0][0], &b.word[0][0] + 2 * kBlock, 0u);
    }
    for (int w = 0; w < 2; ++w) {
      const uint32_t* x = a.word[w];
      const uint32_t* y = b.word[crossed ? 1 - w : w];
      for (int bit = 0; bit < 32; ++bit) {
        uint32_t set = 0;
        for (int j = 0; j < kBlock; ++j) {
          set += (x[j] ^ y[j]) >> bit & 1u;
        }
        ones[static_cast<size_t>(32 * w + bit)] += set;
      }
      for (int half = 0; half < 2; ++half) {
        const auto centred = [half](uint32_t z) {
          return static_cast<float>(static_cast<int>(z >> (16 * half) & 0xffffu)) - 32767.5f;
        };
        float sum = 0.0f;
        for (int j = 0; j < kBlock; ++j) {
          sum += other == nullptr ? centred(x[j]) * 32767.5f : centred(x[j]) * centred(y[j]);
        }
        products[2 * w + half] += static_cast<double>(sum);
      }
    }
  }
  const auto count = static_cast<double>(blocks * kBlock);
  const double variance = 65536.0 * 65536.0 / 12.0;
  Deviation deviation;
  for (const uint64_t set : ones) {
    deviation.add(2.0 * static_cast<double>(set) / count - 1.0, count);
  }
  for (const double product : products) {
    deviation.add(product / variance / count, count / (other == nullptr ? 3.0 : 1.0));
  }
  return deviation;
}

// Tests that every 16-bit half takes each of its values equally often.
Deviation frequencies(uint64_t blocks) {
  std::vector<std::vector<uint32_t>> seen(4, std::vector<uint32_t>(65536, 0));
  static Words a;
  for (uint64_t block = 0; block < blocks; ++block) {
    draw({}, block, a);
    for (int w = 0; w < 2; ++w) {
      for (const uint32_t word : a.word[w]) {
        ++seen[static_cast<size_t>(2 * w)][word & 0xffffu];
        ++seen[static_cast<size_t>(2 * w + 1)][word >> 16];
      }
    }
  }
  const double expected = static_cast<double>(blocks * kBlock) / 65536.0;
  Deviation deviation;
  for (const auto& counts : seen) {
    double chi_square = 0.0;
    for (const uint32_t count : counts) {
      chi_square += (count - expected) * (count - expected) / expected;
    }
    deviation.sigmas = std::max(deviation.sigmas, (chi_square - 65535.0) / std::sqrt(2 * 65535.0));
  }
  return deviation;
}

class Report {
 public:
  void add(const std::string& name, const Deviation& deviation) {
    const bool fails = deviation.share > kMost + 6.0 / std::sqrt(draws_);
    failed_ = failed_ || fails;
    std::printf("%-44s %6.1f sigma %10.6f%s\n", name.c_str(), deviation.sigmas, deviation.share,
                fails ? "  FAILED" : "");
    std::fflush(stdout);
  }
  explicit Report(double draws) : draws_(draws) {}
  bool failed() const { return failed_; }

 private:
  double draws_;
  bool failed_ = false;
};

int run(double draws) {
  const Element start;
  const auto with = [&](auto&& change) {
    Element element = start;
    change(element);
    return element;
  };
  constexpr uint64_t kLags[] = {1,
                                2,
                                3,
                                4,
                                7,
                                8,
                                16,
                                31,
                                32,
                                64,
                                100,
                                256,
                                512,
                                768,
                                1024,
                                3072,
                                4096,
                                16384,
                                65536,
                                uint64_t{1} << 20,
                                uint64_t{1} << 24};
  constexpr uint32_t kNext[] = {1, 2, 3, 100, 1000};
  constexpr size_t kTests = 3 + std::size(kLags) + 32 + 4 * std::size(kNext);
  const auto blocks = std::max<uint64_t>(1, static_cast<uint64_t>(draws / (2.0 * kBlock * kTests)));
  Report report(static_cast<double>(blocks) * kBlock);
  report.add("bits by themselves", compare(start, nullptr, false, blocks));
  report.add("frequencies of 16-bit halves", frequencies(blocks));
  report.add("first word beside second", compare(start, &start, true, blocks));
  const auto pair = [&](const std::string& name, const Element& other) {
    report.add(name, compare(start, &other, false, blocks));
  };
  for (const uint64_t lag : kLags) {
    pair("elements " + std::to_string(lag) + " apart", with([&](Element& e) { e.first += lag; }));
  }
  for (int bit = 0; bit < 32; ++bit) {
    pair("elements that differ in bit " + std::to_string(bit),
         with([&](Element& e) { e.flipped = 1u << bit; }));
  }
  for (const uint32_t next : kNext) {
    const std::string apart = std::to_string(next) + " apart";
    pair("parameters " + apart, with([&](Element& e) { e.key.parameter += next; }));
    pair("steps " + apart, with([&](Element& e) { e.key.step += next; }));
    pair("seeds " + apart, with([&](Element& e) { e.key.seed += next; }));
    pair("upper halves " + apart,
         with([&](Element& e) { e.first += static_cast<uint64_t>(next) << 32; }));
  }
  std::printf("%.2g draws of 32 bits: %s\n", 2.0 * static_cast<double>(blocks * kBlock * kTests),
              report.failed() ? "failed" : "passed");
  return report.failed() ? 1 : 0;
}

}  // namespace
}  // namespace torchopt_ext

int main(int count, char** arguments) {
  return torchopt_ext::run(count > 1 ? std::atof(arguments[1]) : 1e8);
}
