#include "kernels/group_step.h"

#include <cstdint>

#include "dispatch.h"
#include "kernels/columns.h"
#include "kernels/parallel.h"
#include "kernels/simd.h"
#include "kernels/with_storage.h"

namespace pyprune {
namespace {

// The groups [begin, end) of a matrix: rows or columns.
struct GroupRange {
  std::int64_t rows;
  std::int64_t cols;
  bool by_row;
  double threshold;
  std::int64_t begin;
  std::int64_t end;
  Piece columns;  // unless by_row
};

template <class T>
struct GroupKernels {
  void (*soft_threshold)(const T* x, T* out, const GroupRange& range);
  void (*moreau)(T* delta, const T* grad, float decay, float gamma, const GroupRange& range);
};

}  // namespace
}  // namespace pyprune

#define PYPRUNE_BODY "kernels/group_step-inl.h"
#include "kernels/foreach_target.h"

namespace pyprune {
namespace {

template <class T>
GroupKernels<T> active_kernels() {
#if PYPRUNE_X86
  static const IsaTable<GroupKernels<T>> table = {
      {scalar::group_kernels<T>(), avx2::group_kernels<T>(), avx512::group_kernels<T>()}};
#else
  static const IsaTable<GroupKernels<T>> table = {
      {scalar::group_kernels<T>(), scalar::group_kernels<T>(), scalar::group_kernels<T>()}};
#endif
  return table.active();
}

template <class Call>
void over_rows(const GroupMatrix& matrix, double threshold, const Call& call) {
  parallel_for(matrix.rows, 1, matrix.threads, [&](std::int64_t begin, std::int64_t end) {
    call(GroupRange{matrix.rows, matrix.cols, true, threshold, begin, end, {}});
  });
}

template <class Call>
void over_columns(const GroupMatrix& matrix, double threshold, const Call& call) {
  Columns state(matrix.cols);
  parallel_for(matrix.cols, kColumnGrain, matrix.threads, [&](std::int64_t begin, std::int64_t end) {
    const Panel panel{begin, end, true};
    GroupRange range{matrix.rows, matrix.cols, false, threshold, begin, end, {}};
    range.columns.rows = matrix.rows;
    range.columns.cols = matrix.cols;
    range.columns.panels = &panel;
    range.columns.panel_count = 1;
    state.lend(&range.columns);
    call(range);
  });
}

template <class Call>
void over_groups(const GroupMatrix& matrix, double threshold, bool by_row, const Call& call) {
  if (by_row) return over_rows(matrix, threshold, call);
  over_columns(matrix, threshold, call);
}

}  // namespace

namespace {

// Rows of one element are the columns of a single row, which fill whole registers.
GroupMatrix widened(GroupMatrix matrix) {
  if (matrix.by_row && matrix.cols == 1) {
    matrix.cols = matrix.rows;
    matrix.rows = 1;
    matrix.by_row = false;
  }
  return matrix;
}

}  // namespace

void group_soft_threshold(const void* x, void* out, double threshold, const GroupMatrix& given) {
  const GroupMatrix matrix = widened(given);
  with_storage(matrix.dtype, [&](auto tag) {
    using T = decltype(tag);
    const auto kernel = active_kernels<T>().soft_threshold;
    over_groups(matrix, threshold, matrix.by_row, [&](const GroupRange& range) {
      kernel(static_cast<const T*>(x), static_cast<T*>(out), range);
    });
  });
}

void moreau_step(void* delta, const void* grad, float decay, float gamma, double threshold,
                 const GroupMatrix& given) {
  const GroupMatrix matrix = widened(given);
  // Without a threshold there are no groups, and rows are the better way to share the work.
  const bool by_row = matrix.by_row || threshold == 0;
  with_storage(matrix.dtype, [&](auto tag) {
    using T = decltype(tag);
    const auto kernel = active_kernels<T>().moreau;
    over_groups(matrix, threshold, by_row, [&](const GroupRange& range) {
      kernel(static_cast<T*>(delta), static_cast<const T*>(grad), decay, gamma, range);
    });
  });
}

}  // namespace pyprune
