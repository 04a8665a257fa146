// States of the host that are stepped in memory of the device: a ring of slots, of which one is
// filled and one is emptied by copy engines while a third is stepped. Free of torch.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace torchopt_ext {

// What a device orders: the caller's current stream, and one stream for each direction of copies.
enum class StagingStream : uint8_t { kCurrent, kUp, kDown };

// The streams of a device. Each runs its work in order, later than the calls below return.
class StagingStreams {
 public:
  static constexpr size_t kEvents = 16;

  virtual ~StagingStreams() = default;
  virtual void copy(StagingStream stream, void* to, const void* from, size_t bytes) = 0;
  // The event is what the stream has to do now. The next record() of the event replaces it, and
  // does not change what other streams already wait for.
  virtual void record(size_t event, StagingStream stream) = 0;
  virtual void wait(StagingStream stream, size_t event) = 0;
};

// Bytes of the host and their place in a slot.
struct StagedCopy {
  char* host;
  size_t offset;
  size_t bytes;
};

inline constexpr size_t kSlots = 3;

// Calls step(b), which launches work on the current stream, for each of the buckets in order, with
// their copies in slot b % kSlots. `slots`: the first slot; each has `slot_bytes`. What the current
// stream does next finds the host's memory written and the slots unused, also if step() raises.
template <class Step>
void run_staged(StagingStreams& streams, const std::vector<std::vector<StagedCopy>>& buckets,
                char* slots, size_t slot_bytes, const Step& step) {
  using enum StagingStream;
  enum : size_t { kUploaded, kStepped = kSlots, kDownloaded = 2 * kSlots, kEnd = 3 * kSlots };
  static_assert(kEnd < StagingStreams::kEvents);
  struct AtEnd {
    StagingStreams& streams;
    ~AtEnd() {
      for (const StagingStream stream : {kUp, kDown}) {
        streams.record(kEnd, stream);
        streams.wait(kCurrent, kEnd);
      }
    }
  };
  streams.record(kEnd, kCurrent);
  streams.wait(kUp, kEnd);
  const AtEnd at_end{streams};
  for (size_t b = 0; b < buckets.size(); ++b) {
    const size_t slot = b % kSlots;
    char* const memory = slots + slot * slot_bytes;
    if (b >= kSlots) {
      streams.wait(kUp, kDownloaded + slot);
    }
    for (const auto& [host, offset, bytes] : buckets[b]) {
      streams.copy(kUp, memory + offset, host, bytes);
    }
    streams.record(kUploaded + slot, kUp);
    streams.wait(kCurrent, kUploaded + slot);
    step(b);
    streams.record(kStepped + slot, kCurrent);
    streams.wait(kDown, kStepped + slot);
    for (const auto& [host, offset, bytes] : buckets[b]) {
      streams.copy(kDown, host, memory + offset, bytes);
    }
    streams.record(kDownloaded + slot, kDown);
  }
}

// Places pieces of the host's memory in a slot. Each begins at the host's offset from a line of
// memory, so that kernels access it as they would the host's. Pieces that follow one another as
// carve() allocates them are one copy.
class SlotLayout {
 public:
  static constexpr size_t kLine = 128;  // carve()'s alignment

  // Returns the piece's offset in the slot.
  size_t add(char* host, size_t bytes) {
    if (host != next_host_) {
      end_ = aligned(end_) + reinterpret_cast<uintptr_t>(host) % kLine;
      copies_.push_back({host, end_, 0});
    }
    StagedCopy& copy = copies_.back();
    const size_t offset = copy.offset + static_cast<size_t>(host - copy.host);
    copy.bytes = offset - copy.offset + bytes;
    end_ = offset + bytes;
    next_host_ = host + aligned(bytes);
    return offset;
  }
  // The bytes that the pieces take, with those between them.
  size_t bytes() const { return end_; }
  std::vector<StagedCopy> take() { return std::move(copies_); }

  static size_t aligned(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

 private:
  std::vector<StagedCopy> copies_;
  size_t end_ = 0;
  const char* next_host_ = nullptr;
};

}  // namespace torchopt_ext
