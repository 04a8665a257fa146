#include "cpu/multiply.h"

#include "cpu/kernel_table.h"

namespace torchopt_ext::cpu {
namespace {

// Below this many multiply-adds a second thread costs more time than it saves.
constexpr int64_t kProductPerThread = int64_t{1} << 20;

// How a product's result is cut into blocks. Large blocks pack their operands less often.
struct Grid {
  int64_t block_rows;
  int64_t block_cols = kBlockCols;
  int64_t rows;  // of blocks
  int64_t cols;
  int64_t blocks;

  Grid(const Product& p, int64_t threads) : block_rows(p.symmetric ? kBlockCols : p.rows) {
    constexpr int64_t kLeast = kBlockCols / 4;
    for (count(p); threads > 1 && 2 * blocks < 3 * threads; count(p)) {
      if (p.symmetric && block_rows > kLeast) {
        block_rows = block_cols = block_rows / 2;
      } else if (!p.symmetric && block_rows > 2 * block_cols) {
        block_rows = ceil_div(ceil_div(block_rows, 2), kLeast) * kLeast;
      } else if (!p.symmetric && block_cols > kLeast) {
        block_cols /= 2;
      } else {
        break;
      }
    }
  }

  Block block(const Product& p, int64_t number) const {
    int64_t i = number;
    int64_t j = 0;
    if (p.symmetric) {  // column by column down to the diagonal
      for (; i > j; ++j) {
        i -= j + 1;
      }
    } else {
      j = number / rows;
      i = number % rows;
    }
    return {i * block_rows, std::min((i + 1) * block_rows, p.rows), j * block_cols,
            std::min((j + 1) * block_cols, p.cols)};
  }

 private:
  void count(const Product& p) {
    rows = ceil_div(p.rows, block_rows);
    cols = ceil_div(p.cols, block_cols);
    blocks = p.symmetric ? cols * (cols + 1) / 2 : rows * cols;
  }
};

}  // namespace

void multiply(const Product& p) {
  const int64_t operations = p.rows * p.cols * p.depth / (p.symmetric ? 2 : 1);
  const int64_t threads = useful_threads(operations, kProductPerThread);
  const Grid grid(p, threads);
  share_out(threads, grid.blocks, [&](int64_t i, int64_t) {
    kernels().product(p, grid.block(p, i), scratch<ProductScratch>());
  });
}

}  // namespace torchopt_ext::cpu
