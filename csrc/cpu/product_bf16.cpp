// Compiled for AVX-512 with BF16 and AMX, and without torch: see kernels.cpp. A block is computed
// in tiles of 32 x 32 over panels of b, whose rows are packed in pairs as both instruction sets
// take them (Intel 64 and IA-32 Architectures Optimization Reference Manual, "Intel AMX").
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "cpu/tile_bf16.h"

namespace torchopt_ext {
namespace {

// Makes the compiler store what it has for `memory`: GCC's intrinsics of AMX do not say that they
// read it (amxtileintrin.h).
inline void publish(const void* memory) { asm volatile("" ::"r"(memory) : "memory"); }

// A tile of 32 x 32 sums in memory, each += over `depth` rows of packed b. The sums start at 0 if
// `is_first`.
struct Amx {
  // Configures the thread's tiles as 16 rows of 64 bytes. Restores the caller's configuration, as
  // another library may rely on it.
  class Session {
   public:
    Session() {
      struct alignas(64) {
        uint8_t palette = 1;
        uint8_t start_row = 0;
        uint8_t reserved[14] = {};
        uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
      } config;
      publish(&config);
      publish(saved_);
      _tile_storeconfig(saved_);
      _tile_loadconfig(&config);
    }
    ~Session() { _tile_loadconfig(saved_); }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;

   private:
    alignas(64) uint8_t saved_[64];
  };

  static void add(const BFloat16* a, int64_t lda, const BFloat16* b, int64_t depth, bool is_first,
                  float* c) {
    const auto row = static_cast<size_t>(lda) * sizeof(BFloat16);
    constexpr size_t kRow = kTile * sizeof(float);
    publish(b);
    if (is_first) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    } else {
      _tile_loadd(0, c, kRow);
      _tile_loadd(1, c + kHalf, kRow);
      _tile_loadd(2, c + kHalf * kTile, kRow);
      _tile_loadd(3, c + kHalf * kTile + kHalf, kRow);
    }
    const BFloat16* lower = a + kHalf * lda;
    for (int64_t k = 0; k < depth; k += kTile) {
      _tile_loadd(4, a + k, row);
      _tile_loadd(6, b + k * kTile, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b + k * kTile + kHalf * kTile, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, lower + k, row);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, kRow);
    _tile_stored(1, c + kHalf, kRow);
    _tile_stored(2, c + kHalf * kTile, kRow);
    _tile_stored(3, c + kHalf * kTile + kHalf, kRow);
  }
};

struct Dots {
  struct Session {};

  static void add(const BFloat16* a, int64_t lda, const BFloat16* b, int64_t depth, bool is_first,
                  float* c) {
    constexpr int kRows = 8;
    for (int i = 0; i < kTile; i += kRows, a += kRows * lda, c += kRows * kTile) {
      __m512 sum[kRows][2];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        for (int h = 0; h < 2; ++h) {
          sum[r][h] = is_first ? __m512{} : _mm512_load_ps(c + r * kTile + h * kHalf);
        }
      }
      for (int64_t k = 0; k < depth; k += 2) {
        const BFloat16* pairs = b + k / kTile * kTile * kTile + k % kTile * kHalf;
        const auto b0 = bit_cast<__m512bh>(_mm512_load_si512(pairs));
        const auto b1 = bit_cast<__m512bh>(_mm512_load_si512(pairs + kHalf * kTile));
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          int32_t pair = 0;
          __builtin_memcpy(&pair, a + r * lda + k, sizeof(pair));
          const auto both = bit_cast<__m512bh>(_mm512_set1_epi32(pair));
          sum[r][0] = _mm512_dpbf16_ps(sum[r][0], both, b0);
          sum[r][1] = _mm512_dpbf16_ps(sum[r][1], both, b1);
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        _mm512_store_ps(c + r * kTile, sum[r][0]);
        _mm512_store_ps(c + r * kTile + kHalf, sum[r][1]);
      }
    }
  }
};

inline __m512 widened(const BFloat16* x) {
  const __m512i bits =
      _mm512_cvtepu16_epi32(_mm256_load_si256(reinterpret_cast<const __m256i*>(x)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

// Rounds a tile of sums, with the addends, and writes it to c, and its mirror image if asked.
inline void write_tile(const Bf16Product& p, int64_t i, int64_t j, const float* sums) {
  const int64_t at = i * p.ldc + j;
  const __m512 alpha = _mm512_set1_ps(p.alpha);
  const auto value = [&](int64_t row, int64_t col) {
    __m512 x = _mm512_mul_ps(alpha, _mm512_load_ps(sums + row * kTile + col));
    for (int n = 0; n < 2 && p.addend[n] != nullptr; ++n) {
      x = _mm512_fmadd_ps(_mm512_set1_ps(p.beta[n]), widened(p.addend[n] + at + row * p.ldc + col),
                          x);
    }
    return x;
  };
  const auto rounded = [&](int64_t row) {
    return bit_cast<__m512i>(_mm512_cvtne2ps_pbh(value(row, kHalf), value(row, 0)));
  };
  if (!p.symmetric) {
    for (int64_t row = 0; row < kTile; ++row) {
      _mm512_store_si512(p.c + at + row * p.ldc, rounded(row));
    }
    return;
  }
  for (int64_t row = 0; i == j && p.diagonal != nullptr && row < kTile; ++row) {
    float x = p.alpha * sums[row * (kTile + 1)];
    for (int n = 0; n < 2 && p.addend[n] != nullptr; ++n) {
      x = __builtin_fmaf(p.beta[n], widen(p.addend[n][at + row * (p.ldc + 1)]), x);
    }
    p.diagonal[i + row] = x;
  }
  alignas(64) __m512i rows[kTile];
  alignas(64) __m512i mirrored[kTile];
  for (int row = 0; row < kTile; ++row) {
    rows[row] = rounded(row);
  }
  transpose_tile(rows, mirrored);
  for (int row = 0; row < kTile; ++row) {
    if (i == j) {  // the upper half's elements also below the diagonal
      const __mmask32 upper = ~uint32_t{0} << row;
      rows[row] = _mm512_mask_blend_epi16(upper, mirrored[row], rows[row]);
    } else {
      _mm512_store_si512(p.c + (j + row) * p.ldc + i, mirrored[row]);
    }
    _mm512_store_si512(p.c + at + row * p.ldc, rows[row]);
  }
}

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

void transpose_tiles(const BFloat16* from, int64_t ldf, int64_t rows, int64_t cols, BFloat16* to,
                     int64_t ldt) {
  alignas(64) __m512i tile[kTile];
  alignas(64) __m512i turned[kTile];
  for (int64_t i = 0; i < rows; i += kTile) {
    for (int64_t j = 0; j < cols; j += kTile) {
      for (int r = 0; r < kTile; ++r) {
        tile[r] = _mm512_load_si512(from + (i + r) * ldf + j);
      }
      transpose_tile(tile, turned);
      for (int r = 0; r < kTile; ++r) {
        _mm512_store_si512(to + (j + r) * ldt + i, turned[r]);
      }
    }
  }
}

template <class Set>
void product(const Bf16Product& p, const Block& block, Bf16Scratch& scratch) {
  [[maybe_unused]] const typename Set::Session session;
  for (int64_t k = 0; k < p.depth; k += kBf16PanelDepth) {
    const int64_t depth = least(p.depth - k, kBf16PanelDepth);
    const auto pack_tile = [&](int64_t j, int64_t n) {
      const BFloat16* from =
          p.b.transposed ? p.b.x + j * p.b.ld + k + n : p.b.x + (k + n) * p.b.ld + j;
      pack(from, p.b.ld, p.b.transposed,
           reinterpret_cast<__m512i*>(scratch.b + (j - block.first_col) * depth + n * kTile));
    };
    const int64_t columns = (block.last_col - block.first_col) / kTile;
    const int64_t strips = depth / kTile;
    for (int64_t t = 0; t < columns * strips; ++t) {  // along the rows in memory
      pack_tile(block.first_col + (p.b.transposed ? t / strips : t % columns) * kTile,
                (p.b.transposed ? t % strips : t / columns) * kTile);
    }
    for (int64_t i = block.first_row; i < block.last_row; i += kTile) {
      float* const sums = scratch.c + (i - block.first_row) * kBf16BlockCols;
      const int64_t first = p.symmetric && i > block.first_col ? i : block.first_col;
      for (int64_t j = first; j < block.last_col; j += kTile) {
        const int64_t column = j - block.first_col;
        Set::add(p.a.x + i * p.a.ld + k, p.a.ld, scratch.b + column * depth, depth, k == 0,
                 sums + column * kTile);
      }
      if (k + depth == p.depth) {
        for (int64_t j = first; j < block.last_col; j += kTile) {
          write_tile(p, i, j, sums + (j - block.first_col) * kTile);
        }
      }
    }
  }
}

// Asks the kernel for the right to use tiles: Documentation/arch/x86/xstate.rst of Linux.
bool has_tiles() {
  constexpr unsigned kAmxBf16 = 1U << 22;
  constexpr unsigned kAmxTile = 1U << 24;
  constexpr int kRequestPermission = 0x1023;
  constexpr int kTileData = 18;
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & kAmxBf16) != 0 &&
         (d & kAmxTile) != 0 && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

bool has_dots() {
  constexpr unsigned kAvx512Bf16 = 1U << 5;
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & kAvx512Bf16) != 0;
}

}  // namespace

const Bf16Kernels* bf16_kernels(bool with_tiles) {
  static const bool dots = has_dots();
  static const bool tiles = dots && has_tiles();
  static constexpr Bf16Kernels kAmx = {product<Amx>, transpose_tiles};
  static constexpr Bf16Kernels kDots = {product<Dots>, transpose_tiles};
  return tiles && with_tiles ? &kAmx : dots ? &kDots : nullptr;
}

}  // namespace torchopt_ext
