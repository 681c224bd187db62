#include "kernels/index_set.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "dispatch.h"
#include "kernels/columns.h"
#include "kernels/parallel.h"
#include "kernels/simd.h"
#include "kernels/with_storage.h"

namespace pyprune {
namespace {

template <class T>
struct IndexSetKernels {
  void (*penalty)(const T* w, T* grad, double penalty_weight, bool l1, const Piece& piece);
  void (*prox)(T* w, double threshold, bool l1, const Piece& piece);
  void (*shrink)(T* w, float factor, const Piece& piece);
  void (*importance)(const T* score, const T* w, bool is_signed, const Piece& piece);
};

}  // namespace
}  // namespace pyprune

#define PYPRUNE_BODY "kernels/index_set-inl.h"
#include "kernels/foreach_target.h"

namespace pyprune {
namespace {

template <class T>
IndexSetKernels<T> active_kernels() {
#if PYPRUNE_X86
  static const IsaTable<IndexSetKernels<T>> table = {
      {scalar::index_set_kernels<T>(), avx2::index_set_kernels<T>(), avx512::index_set_kernels<T>()}};
#else
  static const IsaTable<IndexSetKernels<T>> table = {
      {scalar::index_set_kernels<T>(), scalar::index_set_kernels<T>(), scalar::index_set_kernels<T>()}};
#endif
  return table.active();
}

// The state of every column; the selected ones are marked.
Columns columns_of(const Selection& selection) {
  Columns columns(selection.cols);
  for (std::int64_t k = 0; k < selection.count; ++k) columns.selected[selection.index[k]] = ~std::uint32_t{0};
  return columns;
}

// The blocks of [begin, end) that hold a selected column, neighbours of one kind as one panel.
std::vector<Panel> panels_of(const std::vector<std::uint32_t>& selected, std::int64_t begin, std::int64_t end) {
  std::vector<Panel> panels;
  for (std::int64_t col = begin; col < end; col += kColumnBlock) {
    const std::int64_t next = std::min(end, col + kColumnBlock);
    const std::int64_t count = std::count(selected.begin() + col, selected.begin() + next, ~std::uint32_t{0});
    const bool whole = count == next - col;
    if (count == 0) continue;
    if (!panels.empty() && panels.back().end == col && panels.back().whole == whole) {
      panels.back().end = next;
    } else {
      panels.push_back({col, next, whole});
    }
  }
  return panels;
}

template <class Call>
void over_rows(const Selection& selection, Piece piece, std::vector<double>* sums, const Call& call) {
  piece.index = selection.index;
  piece.sums = sums->data();
  parallel_for(selection.count, 1, selection.threads, [&](std::int64_t begin, std::int64_t end) {
    Piece own = piece;
    own.begin = begin;
    own.end = end;
    if (begin < end) call(own);
  });
}

template <class Call>
void over_columns(const Selection& selection, Piece piece, std::vector<double>* sums, const Call& call) {
  Columns columns = columns_of(selection);
  columns.lend(&piece);
  parallel_for(selection.cols, kColumnGrain, selection.threads, [&](std::int64_t begin, std::int64_t end) {
    const std::vector<Panel> panels = panels_of(columns.selected, begin, end);
    Piece own = piece;
    own.panels = panels.data();
    own.panel_count = static_cast<std::int64_t>(panels.size());
    call(own);
  });
  for (std::int64_t k = 0; k < selection.count; ++k) (*sums)[k] = columns.sums[selection.index[k]];
}

// Calls call(piece) on every thread's share. Returns the sum of each group, in the order of the index.
template <class Call>
std::vector<double> over_selection(const Selection& given, const Call& call) {
  const Selection selection = widened(given);
  Piece piece{};
  piece.rows = selection.rows;
  piece.cols = selection.cols;
  piece.by_row = selection.by_row;
  piece.offset = selection.offset;
  std::vector<double> sums(selection.count);
  if (selection.by_row) {
    over_rows(selection, piece, &sums, call);
  } else {
    over_columns(selection, piece, &sums, call);
  }
  return sums;
}

}  // namespace

namespace {

// The sum of each selected group: of absolute values, or of squares; beside adding to the gradient, if there is one.
std::vector<double> penalty_sums(const void* w, void* grad, double penalty_weight, bool l1, const Selection& selection) {
  std::vector<double> sums;
  with_storage(selection.dtype, [&](auto tag) {
    using T = decltype(tag);
    const auto kernel = active_kernels<T>().penalty;
    sums = over_selection(selection, [&](const Piece& piece) {
      kernel(static_cast<const T*>(w), static_cast<T*>(grad), penalty_weight, l1, piece);
    });
  });
  return sums;
}

}  // namespace

float slope_scale(double sum, double penalty_weight) {
  constexpr float kLargest = std::numeric_limits<float>::max();
  if (sum == 0) return 0.0f;
  const double scale = penalty_weight / std::sqrt(sum);
  if (std::fabs(scale) > kLargest && std::isfinite(penalty_weight)) return scale < 0 ? -kLargest : kLargest;
  return static_cast<float>(scale);
}

std::vector<double> group_squares(const void* w, const Selection& selection) {
  return penalty_sums(w, nullptr, 0, false, selection);
}

double group_penalty(const void* w, void* grad, double penalty_weight, bool l1, const Selection& selection) {
  // Any NaN stands for every NaN; the one that bfloat16 can hold survives its rounding.
  if (std::isnan(penalty_weight)) penalty_weight = std::numeric_limits<double>::quiet_NaN();
  const std::vector<double> sums = penalty_sums(w, grad, penalty_weight, l1, selection);
  // In the order of the index, whatever the number of threads was.
  double value = 0;
  for (const double sum : sums) value += l1 ? sum : __builtin_sqrt(sum);
  return value;
}

void group_prox(void* w, double threshold, bool l1, const Selection& selection) {
  with_storage(selection.dtype, [&](auto tag) {
    using T = decltype(tag);
    const auto kernel = active_kernels<T>().prox;
    over_selection(selection, [&](const Piece& piece) { kernel(static_cast<T*>(w), threshold, l1, piece); });
  });
}

void shrink(void* w, float factor, const Selection& selection) {
  with_storage(selection.dtype, [&](auto tag) {
    using T = decltype(tag);
    const auto kernel = active_kernels<T>().shrink;
    over_selection(selection, [&](const Piece& piece) { kernel(static_cast<T*>(w), factor, piece); });
  });
}

std::vector<double> group_importance(const void* score, const void* w, bool is_signed, const Selection& selection) {
  std::vector<double> sums;
  with_storage(selection.dtype, [&](auto tag) {
    using T = decltype(tag);
    const auto kernel = active_kernels<T>().importance;
    sums = over_selection(selection, [&](const Piece& piece) {
      kernel(static_cast<const T*>(score), static_cast<const T*>(w), is_signed, piece);
    });
  });
  return sums;
}

}  // namespace pyprune
