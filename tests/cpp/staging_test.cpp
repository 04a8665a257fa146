// Tests the ring of slots with simulated streams, each a thread whose work takes random times. A
// build of its own runs it under ThreadSanitizer, too: a missing wait is then a data race.
#include "work/staging.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <thread>

namespace torchopt_ext {
namespace {

// A thread that does its work in order, each after a random delay.
class Worker {
 public:
  explicit Worker(uint32_t seed) : random_(seed), thread_([this] { run(); }) {}
  ~Worker() {
    add(nullptr);
    thread_.join();
  }
  void add(std::function<void()> work) {
    {
      const std::scoped_lock lock(mutex_);
      work_.push_back(std::move(work));
    }
    changed_.notify_one();
  }

 private:
  void run() {
    for (;;) {
      std::function<void()> next;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return !work_.empty(); });
        next = std::move(work_.front());
        work_.pop_front();
      }
      if (next == nullptr) {
        return;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(random_() % 200));
      next();
    }
  }

  std::mt19937 random_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  std::thread thread_;
};

class Flag {
 public:
  void set() {
    {
      const std::scoped_lock lock(mutex_);
      is_set_ = true;
    }
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return is_set_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_set_ = false;
};

class SimulatedStreams final : public StagingStreams {
 public:
  explicit SimulatedStreams(uint32_t seed) {
    for (auto& worker : workers_) {
      worker = std::make_unique<Worker>(seed++);
    }
  }
  void copy(StagingStream stream, void* to, const void* from, size_t bytes) override {
    launch(stream, [=] { std::memcpy(to, from, bytes); });
  }
  void record(size_t event, StagingStream stream) override {
    auto flag = std::make_shared<Flag>();
    events_.at(event) = flag;
    launch(stream, [flag] { flag->set(); });
  }
  void wait(StagingStream stream, size_t event) override {
    launch(stream, [flag = events_.at(event)] { flag->wait(); });
  }
  void launch(StagingStream stream, std::function<void()> work) {
    workers_.at(static_cast<size_t>(stream))->add(std::move(work));
  }
  // Waits for the current stream, as a program does before it reads memory.
  void synchronize() {
    const auto flag = std::make_shared<Flag>();
    launch(StagingStream::kCurrent, [flag] { flag->set(); });
    flag->wait();
  }

 private:
  std::array<std::shared_ptr<Flag>, kEvents> events_;
  std::array<std::unique_ptr<Worker>, 3> workers_;
};

struct Ring {
  explicit Ring(size_t buckets) : host(buckets * kValues), copies(buckets) {
    for (size_t i = 0; i < host.size(); ++i) {
      host[i] = static_cast<int>(i);
    }
    for (size_t b = 0; b < buckets; ++b) {  // in two pieces, the second first
      auto* const first = reinterpret_cast<char*>(&host[b * kValues]);
      copies[b] = {{first + kBytes / 2, 0, kBytes / 2}, {first, kBytes / 2, kBytes / 2}};
    }
  }
  // Adds one to every value, by work of the current stream on the slots.
  void run(SimulatedStreams& streams, size_t failing = SIZE_MAX) {
    run_staged(streams, copies, reinterpret_cast<char*>(slots.data()), kBytes, [&](size_t b) {
      if (b == failing) {
        throw std::runtime_error("no launch");
      }
      int* const slot = slots.data() + b % kSlots * kValues;
      streams.launch(StagingStream::kCurrent, [=] {
        for (size_t i = 0; i < kValues; ++i) {
          ++slot[i];
        }
      });
    });
  }

  static constexpr size_t kValues = 64;
  static constexpr size_t kBytes = kValues * sizeof(int);
  std::vector<int> host;
  std::vector<int> slots = std::vector<int>(kSlots * kValues, -1);
  std::vector<std::vector<StagedCopy>> copies;
};

TEST(Staging, StepsEveryBucketOnce) {
  for (uint32_t seed = 0; seed < 8; ++seed) {
    for (const size_t buckets : {0, 1, 2, 3, 4, 11}) {
      Ring ring(buckets);
      SimulatedStreams streams(seed);
      ring.run(streams);
      ring.run(streams);  // finds what the first has written
      streams.synchronize();
      for (size_t i = 0; i < ring.host.size(); ++i) {
        ASSERT_EQ(ring.host[i], static_cast<int>(i) + 2) << buckets << " buckets, seed " << seed;
      }
    }
  }
}

TEST(Staging, WaitsForItsCopiesWhenAStepRaises) {
  for (uint32_t seed = 0; seed < 8; ++seed) {
    constexpr size_t kBuckets = 7;
    for (size_t failing = 0; failing < kBuckets; ++failing) {
      Ring ring(kBuckets);
      SimulatedStreams streams(seed);
      EXPECT_THROW(ring.run(streams, failing), std::runtime_error);
      streams.synchronize();
      std::ranges::fill(ring.slots, 0);  // freed, and used by others: no copy may be under way
      for (size_t i = 0; i < ring.host.size(); ++i) {
        const int expected = static_cast<int>(i) + (i / Ring::kValues < failing ? 1 : 0);
        ASSERT_EQ(ring.host[i], expected) << "bucket " << failing << ", seed " << seed;
      }
    }
  }
}

TEST(SlotLayout, JoinsNeighboursAndKeepsAlignment) {
  alignas(SlotLayout::kLine) std::array<char, 4096> host{};
  SlotLayout layout;
  EXPECT_EQ(layout.add(host.data() + 256, 100), 0);
  EXPECT_EQ(layout.add(host.data() + 384, 128), 128);  // the next of carve()
  EXPECT_EQ(layout.add(host.data() + 512, 7), 256);
  EXPECT_EQ(layout.add(host.data() + 1027, 50), 384 + 3);  // elsewhere, within a line
  EXPECT_EQ(layout.add(host.data() + 512, 1), 512);        // backwards
  EXPECT_EQ(layout.bytes(), 513);
  const std::vector<StagedCopy> copies = layout.take();
  ASSERT_EQ(copies.size(), 3);
  EXPECT_EQ(copies[0].host, host.data() + 256);
  EXPECT_EQ(copies[0].offset, 0);
  EXPECT_EQ(copies[0].bytes, 256 + 7);
  EXPECT_EQ(copies[1].bytes, 50);
  EXPECT_EQ(copies[2].offset, 512);
}

}  // namespace
}  // namespace torchopt_ext
