// How the groups of a matrix are shared between threads, and how bodies are told of their share: rows, or columns in
// panels. The loops over them are in groups-inl.h, rows-inl.h and columns-inl.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/common/parallel.h"
#include "kernels/common/selection.h"

namespace pyprune {

// Columns are worked on in blocks of this many, which is two registers on the widest instruction set.
constexpr std::int64_t kColumnBlock = 32;

// Threads get whole blocks of columns, and whole cache lines of most matrices.
constexpr std::int64_t kColumnGrain = 64;
static_assert(kColumnGrain % kColumnBlock == 0, "no block is shared between threads");

// The factor of a group in the group soft-threshold, 0 for a group that is removed. The comparison is written so that a
// NaN norm gives a NaN factor, and so spreads over its group.
inline float shrink_scale(double squared_norm, double threshold) {
  const double norm = std::sqrt(squared_norm);
  return norm <= threshold ? 0.0f : static_cast<float>(1.0 - threshold / norm);
}

// Neighbouring columns; begins at a block. whole: all of them are selected.
struct Panel {
  std::int64_t begin;
  std::int64_t end;
  bool whole;
};

// One thread's share: the selected rows at the positions [begin, end), at least one; or panels of columns.
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
  std::uint32_t* selected;  // one a column: every bit set, or none; not filled where every column is selected

  // The offset of the row at a position.
  std::int64_t row_start(std::int64_t position) const {
    return (index == nullptr ? position : index[position]) * cols;
  }
};

// A matrix whose groups are rows of one element, as the columns of a single row, which fill whole registers.
inline Selection widened(Selection selection) {
  if (selection.by_row && selection.cols == 1) {
    selection.cols = selection.rows;
    selection.rows = 1;
    selection.by_row = false;
  }
  return selection;
}

// The state of every column, with room for a last block that the matrix does not fill.
struct Columns {
  std::vector<double> sums;
  std::vector<float> scales;
  std::vector<std::uint32_t> selected;

  explicit Columns(const Selection& selection)
      : sums(selection.cols + kColumnBlock), scales(sums.size()), selected(sums.size()) {
    if (selection.index == nullptr) return;
    for (std::int64_t k = 0; k < selection.count; ++k) selected[selection.index[k]] = ~std::uint32_t{0};
  }
};

// The begins of the grains that hold a selected column. Threads share these grains: pieces of the whole matrix would
// leave most of a selection that lies together, such as the last quarter of the columns, to few threads.
inline std::vector<std::int64_t> grains_of(const Selection& selection, const Columns& columns) {
  std::vector<std::int64_t> grains;
  const auto selected = columns.selected.begin();
  for (std::int64_t col = 0; col < selection.cols; col += kColumnGrain) {
    const std::int64_t next = std::min(selection.cols, col + kColumnGrain);
    const bool any = selection.index == nullptr ||
                     std::find(selected + col, selected + next, ~std::uint32_t{0}) != selected + next;
    if (any) grains.push_back(col);
  }
  return grains;
}

// The blocks of these grains that hold a selected column, neighbours of one kind as one panel.
inline std::vector<Panel> panels_of(const Selection& selection, const Columns& columns, const std::int64_t* grains,
                                    std::int64_t grain_count) {
  std::vector<Panel> panels;
  const auto selected = columns.selected.begin();
  const auto add = [&](std::int64_t begin, std::int64_t end) {
    const bool every = selection.index == nullptr;
    const std::int64_t count = every ? end - begin : std::count(selected + begin, selected + end, ~std::uint32_t{0});
    const bool whole = count == end - begin;
    if (count == 0) return;
    if (!panels.empty() && panels.back().end == begin && panels.back().whole == whole) {
      panels.back().end = end;
    } else {
      panels.push_back({begin, end, whole});
    }
  };
  for (std::int64_t grain = 0; grain < grain_count; ++grain) {
    const std::int64_t end = std::min(selection.cols, grains[grain] + kColumnGrain);
    for (std::int64_t col = grains[grain]; col < end; col += kColumnBlock) add(col, std::min(end, col + kColumnBlock));
  }
  return panels;
}

template <class Call>
void share_rows(const Selection& selection, const Piece& all, const Call& call) {
  parallel_for(selection.count, 1, selection.threads, [&](std::int64_t begin, std::int64_t end) {
    Piece own = all;
    own.begin = begin;
    own.end = end;
    if (begin < end) call(own);
  });
}

template <class Call>
void share_columns(const Selection& selection, const Piece& all, const Call& call) {
  Columns columns(selection);
  const std::vector<std::int64_t> grains = grains_of(selection, columns);
  const std::int64_t count = static_cast<std::int64_t>(grains.size());
  parallel_for(count, 1, selection.threads, [&](std::int64_t begin, std::int64_t end) {
    const std::vector<Panel> panels = panels_of(selection, columns, grains.data() + begin, end - begin);
    Piece own = all;
    own.panels = panels.data();
    own.panel_count = static_cast<std::int64_t>(panels.size());
    own.sums = columns.sums.data();
    own.scales = columns.scales.data();
    own.selected = columns.selected.data();
    call(own);
  });
  for (std::int64_t k = 0; k < selection.count; ++k) {
    all.sums[k] = columns.sums[selection.index == nullptr ? k : selection.index[k]];
  }
}

// Calls call(piece) on every thread's share. Returns the sum of each group, in the order of the index, where the body
// makes sums.
template <class Call>
std::vector<double> share_groups(const Selection& given, const Call& call) {
  if (given.count == 0) return {};  // an empty index may be null, which would stand for every group
  const Selection selection = widened(given);
  std::vector<double> sums(static_cast<std::size_t>(selection.count));
  Piece piece{};
  piece.rows = selection.rows;
  piece.cols = selection.cols;
  piece.by_row = selection.by_row;
  piece.offset = selection.offset;
  piece.index = selection.index;
  piece.sums = sums.data();
  if (selection.by_row) {
    share_rows(selection, piece, call);
  } else {
    share_columns(selection, piece, call);
  }
  return sums;
}

}  // namespace pyprune
