#include "kernels/group_step.h"

#include <cstdint>

#include "dispatch.h"
#include "kernels/columns.h"
#include "kernels/parallel.h"
#include "kernels/simd.h"
#include "kernels/with_storage.h"

namespace pyprune {
namespace {

template <class T>
struct GroupKernels {
  void (*soft_threshold)(const T* x, T* out, double threshold, const Piece& piece);
  void (*moreau)(T* delta, const T* grad, float decay, float gamma, double threshold, const Piece& piece);
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
void over_rows(const GroupMatrix& matrix, Piece piece, const Call& call) {
  piece.by_row = true;
  parallel_for(matrix.rows, 1, matrix.threads, [&](std::int64_t begin, std::int64_t end) {
    Piece own = piece;
    own.begin = begin;
    own.end = end;
    call(own);
  });
}

template <class Call>
void over_columns(const GroupMatrix& matrix, Piece piece, const Call& call) {
  Columns columns(matrix.cols);
  columns.lend(&piece);
  parallel_for(matrix.cols, kColumnGrain, matrix.threads, [&](std::int64_t begin, std::int64_t end) {
    const Panel panel{begin, end, true};
    Piece own = piece;
    own.panels = &panel;
    own.panel_count = 1;
    call(own);
  });
}

template <class Call>
void over_groups(const GroupMatrix& matrix, bool by_row, const Call& call) {
  Piece piece{};
  piece.rows = matrix.rows;
  piece.cols = matrix.cols;
  if (by_row) return over_rows(matrix, piece, call);
  over_columns(matrix, piece, call);
}

}  // namespace

void group_soft_threshold(const void* x, void* out, double threshold, const GroupMatrix& given) {
  const GroupMatrix matrix = widened(given);
  with_storage(matrix.dtype, [&](auto tag) {
    using T = decltype(tag);
    const auto kernel = active_kernels<T>().soft_threshold;
    over_groups(matrix, matrix.by_row, [&](const Piece& piece) {
      kernel(static_cast<const T*>(x), static_cast<T*>(out), threshold, piece);
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
    over_groups(matrix, by_row, [&](const Piece& piece) {
      kernel(static_cast<T*>(delta), static_cast<const T*>(grad), decay, gamma, threshold, piece);
    });
  });
}

}  // namespace pyprune
