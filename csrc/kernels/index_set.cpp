#include "kernels/index_set.h"

#include <cstdint>
#include <vector>

#include "dispatch.h"
#include "kernels/parallel.h"
#include "kernels/simd.h"
#include "kernels/with_storage.h"

namespace pyprune {
namespace {

// Consecutive columns at consecutive positions of the index.
struct Run {
  std::int64_t column;
  std::int64_t position;
  std::int64_t length;
};

// The positions [begin, end) of a selection, all of one thread.
struct Piece {
  std::int64_t rows;
  std::int64_t cols;
  bool by_row;
  const std::int64_t* index;
  std::int64_t begin;
  std::int64_t end;
  const Run* runs;  // of these columns; null for rows
  std::int64_t run_count;
  double* sums;   // one a position
  float* scales;  // one a position
};

template <class T>
struct IndexSetKernels {
  void (*penalty)(const T* w, T* grad, double strength, bool l1, const Piece& piece);
  void (*prox)(T* w, double threshold, bool l1, const Piece& piece);
  void (*shrink)(T* w, float factor, const Piece& piece);
  void (*importance)(const T* score, const T* w, const Piece& piece);
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

// Positions are handed out in blocks of this many columns, so that threads share few cache lines.
constexpr std::int64_t kColumnGrain = 64;

std::vector<Run> runs_of(const Selection& selection, std::int64_t begin, std::int64_t end) {
  std::vector<Run> runs;
  for (std::int64_t position = begin; position < end; ++position) {
    const std::int64_t column = selection.index[position];
    if (!runs.empty() && runs.back().column + runs.back().length == column) {
      ++runs.back().length;
    } else {
      runs.push_back({column, position, 1});
    }
  }
  return runs;
}

// Calls call(piece) on every thread's share.
template <class Call>
void over_selection(Selection selection, double* sums, float* scales, const Call& call) {
  // Rows of one element are the columns of a single row, which fill whole registers.
  if (selection.by_row && selection.cols == 1) {
    selection.cols = selection.rows;
    selection.rows = 1;
    selection.by_row = false;
  }
  const std::int64_t grain = selection.by_row ? 1 : kColumnGrain;
  parallel_for(selection.count, grain, selection.threads, [&](std::int64_t begin, std::int64_t end) {
    const std::vector<Run> runs = selection.by_row ? std::vector<Run>() : runs_of(selection, begin, end);
    call(Piece{selection.rows, selection.cols, selection.by_row, selection.index, begin, end, runs.data(),
               static_cast<std::int64_t>(runs.size()), sums, scales});
  });
}

}  // namespace

double group_penalty(const void* w, void* grad, double strength, bool l1, const Selection& selection) {
  std::vector<double> sums(selection.count);
  std::vector<float> scales(selection.count);
  with_storage(selection.dtype, [&](auto tag) {
    using T = decltype(tag);
    const auto kernel = active_kernels<T>().penalty;
    over_selection(selection, sums.data(), scales.data(), [&](const Piece& piece) {
      kernel(static_cast<const T*>(w), static_cast<T*>(grad), strength, l1, piece);
    });
  });
  // In the order of the index, whatever the number of threads was.
  double value = 0;
  for (const double sum : sums) value += l1 ? sum : __builtin_sqrt(sum);
  return value;
}

void group_prox(void* w, double threshold, bool l1, const Selection& selection) {
  std::vector<double> sums(selection.count);
  std::vector<float> scales(selection.count);
  with_storage(selection.dtype, [&](auto tag) {
    using T = decltype(tag);
    const auto kernel = active_kernels<T>().prox;
    over_selection(selection, sums.data(), scales.data(),
                   [&](const Piece& piece) { kernel(static_cast<T*>(w), threshold, l1, piece); });
  });
}

void shrink(void* w, float factor, const Selection& selection) {
  with_storage(selection.dtype, [&](auto tag) {
    using T = decltype(tag);
    const auto kernel = active_kernels<T>().shrink;
    over_selection(selection, nullptr, nullptr,
                   [&](const Piece& piece) { kernel(static_cast<T*>(w), factor, piece); });
  });
}

void group_importance(const void* score, const void* w, double* sums, const Selection& matrix) {
  with_storage(matrix.dtype, [&](auto tag) {
    using T = decltype(tag);
    const auto kernel = active_kernels<T>().importance;
    over_selection(matrix, sums, nullptr, [&](const Piece& piece) {
      kernel(static_cast<const T*>(score), static_cast<const T*>(w), piece);
    });
  });
}

}  // namespace pyprune
