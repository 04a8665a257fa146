// Loops over entries in parallel to another task: each entry comes once, and in the right order.
#include "plan/for_each_entry.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

namespace torchopt_ext {
namespace {

struct Threads {
  explicit Threads(int n) { at::set_num_threads(n); }
  ~Threads() { at::set_num_threads(before); }
  int before = at::get_num_threads();
};

constexpr size_t kSizes[] = {0, 1, kFewEntries, kFewEntries + 1, 1000, 5000};

TEST(ForEachEntry, RunsATaskOnTheCallingThread) {
  for (const int n : {1, 3, 4, 7}) {
    const Threads threads(n);
    for (const size_t entries : kSizes) {
      std::vector<int> visits(entries);
      const auto caller = std::this_thread::get_id();
      std::thread::id ran_on;
      int runs = 0;
      for_each_entry_beside(
          entries,
          [&](size_t begin, size_t end) {
            std::for_each(&visits[begin], &visits[end], [](int& visit) { ++visit; });
          },
          [&] {
            ran_on = std::this_thread::get_id();
            ++runs;
          });
      EXPECT_EQ(ran_on, caller);
      EXPECT_EQ(runs, 1);
      EXPECT_TRUE(std::all_of(visits.begin(), visits.end(), [](int visit) { return visit == 1; }));
    }
  }
}

TEST(ForEachEntry, EndsAfterTheTaskUnlessItRaises) {
  for (const int n : {1, 3, 4, 7}) {
    const Threads threads(n);
    for (const size_t entries : kSizes) {
      for (const bool raises : {false, true}) {
        std::vector<int> stages(entries);
        std::atomic<bool> done = false;
        std::atomic<bool> in_order = true;
        const auto run = [&] {
          for_each_entry_after(
              entries,
              [&] {
                if (raises) {
                  throw std::runtime_error("no memory");
                }
                done = true;
              },
              [&](size_t begin, size_t end) { std::fill(&stages[begin], &stages[end], 1); },
              [&](size_t begin, size_t end) {
                for (size_t i = begin; i < end; ++i) {
                  in_order = in_order && done && stages[i] == 1;
                  stages[i] = 2;
                }
              });
        };
        if (raises) {
          EXPECT_THROW(run(), std::runtime_error);
        } else {
          run();
        }
        EXPECT_TRUE(in_order);
        const auto is_last = [&](int stage) { return raises ? stage < 2 : stage == 2; };
        EXPECT_TRUE(std::all_of(stages.begin(), stages.end(), is_last));
      }
    }
  }
}

}  // namespace
}  // namespace torchopt_ext
