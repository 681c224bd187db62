// How bodies are told of the groups they work on: rows, or columns in panels. The loops are in columns-inl.h.
#pragma once

#include <cstdint>
#include <vector>

namespace pyprune {

// Columns are worked on in blocks of this many, which is two registers on the widest instruction set.
constexpr std::int64_t kColumnBlock = 32;

// Neighbouring columns; begins at a block. whole: all of them are selected.
struct Panel {
  std::int64_t begin;
  std::int64_t end;
  bool whole;
};

// One thread's share: the rows [begin, end), or those that the positions [begin, end) of an index name, at least one; or
// panels of columns.
struct Piece {
  std::int64_t rows;
  std::int64_t cols;
  bool by_row;
  float offset;
  const std::int64_t* index;
  std::int64_t begin;
  std::int64_t end;
  const Panel* panels;
  std::int64_t panel_count;
  double* sums;             // one a position, or one a column
  float* scales;            // one a column
  std::uint32_t* selected;  // one a column: every bit set, or none
};

// A matrix whose groups are rows of one element, as the columns of a single row, which fill whole registers.
template <class Matrix>
Matrix widened(Matrix matrix) {
  if (matrix.by_row && matrix.cols == 1) {
    matrix.cols = matrix.rows;
    matrix.rows = 1;
    matrix.by_row = false;
  }
  return matrix;
}

// Threads get whole blocks of columns, and whole cache lines of most matrices.
constexpr std::int64_t kColumnGrain = 64;
static_assert(kColumnGrain % kColumnBlock == 0, "no block is shared between threads");

// The state of every column, with room for a last block that the matrix does not fill.
struct Columns {
  std::vector<double> sums;
  std::vector<float> scales;
  std::vector<std::uint32_t> selected;

  explicit Columns(std::int64_t cols) : sums(cols + kColumnBlock), scales(sums.size()), selected(sums.size()) {}

  void lend(Piece* piece) {
    piece->sums = sums.data();
    piece->scales = scales.data();
    piece->selected = selected.data();
  }
};

}  // namespace pyprune
