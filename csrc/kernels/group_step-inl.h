// Bodies of the group soft-threshold and of the Moreau step, compiled once per instruction set. Both are "evaluate
// each element, shrink its group": a source object evaluates element i in float32, and the groups are rows or columns.
// An element is evaluated twice, for the norm and for the product, instead of being stored (and rounded) in between.
// Sums run in double over a fixed number of lanes: squares of float32 can neither overflow nor vanish, and the result
// is the same on every instruction set.
#include "kernels/storage-inl.h"

namespace pyprune {
namespace PYPRUNE_TARGET_NAMESPACE {
namespace {

constexpr int kLanes = 32;
constexpr int kColumnBlock = 64;

template <class T>
struct Plain {
  const T* x;
  float at(std::int64_t i) const { return load(x[i]); }
  Plain shifted(std::int64_t offset) const { return {x + offset}; }
};

template <class T>
struct Stepped {
  const T* delta;
  const T* grad;
  float decay;
  float gamma;
  float at(std::int64_t i) const { return load(delta[i]) * decay - load(grad[i]) * gamma; }
  Stepped shifted(std::int64_t offset) const { return {delta + offset, grad + offset, decay, gamma}; }
};

// The comparison is written so that a NaN norm gives a NaN scale, and so spreads over its group.
inline float shrink_scale(double squared_norm, double threshold) {
  const double norm = __builtin_sqrt(squared_norm);
  return norm <= threshold ? 0.0f : static_cast<float>(1.0 - threshold / norm);
}

template <class Source>
double squared_norm(Source source, std::int64_t count) {
  double lanes[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const double value = source.at(i + lane);
      lanes[lane] += value * value;
    }
  }
  for (int lane = 0; i < count; ++i, ++lane) {
    const double value = source.at(i);
    lanes[lane] += value * value;
  }
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

// out may be what the source reads: element i is evaluated before it is written, and nothing later needs it.
template <class Source, class T>
void shrink_rows(Source all, T* out, const GroupRange& range) {
  for (std::int64_t row = range.begin; row < range.end; ++row) {
    const Source source = all.shifted(row * range.cols);
    T* target = out + row * range.cols;
    const float scale = shrink_scale(squared_norm(source, range.cols), range.threshold);
    if (scale == 0.0f) {
      // Written, not multiplied: a removed group is exactly +0, whatever its signs were.
      for (std::int64_t i = 0; i < range.cols; ++i) store(target + i, 0.0f);
      continue;
    }
    for (std::int64_t i = 0; i < range.cols; ++i) store(target + i, source.at(i) * scale);
  }
}

// One block of at most kColumnBlock columns: once down for the norms, once down for the product. The block is
// narrow enough for the second pass to find it in the cache.
template <class Source, class T>
void shrink_column_block(Source all, T* out, const GroupRange& range, int width) {
  double sums[kColumnBlock] = {};
  float scales[kColumnBlock];
  for (std::int64_t row = 0; row < range.rows; ++row) {
    const Source source = all.shifted(row * range.cols);
    for (int i = 0; i < width; ++i) {
      const double value = source.at(i);
      sums[i] += value * value;
    }
  }
  for (int i = 0; i < width; ++i) scales[i] = shrink_scale(sums[i], range.threshold);
  for (std::int64_t row = 0; row < range.rows; ++row) {
    const Source source = all.shifted(row * range.cols);
    T* target = out + row * range.cols;
    for (int i = 0; i < width; ++i) {
      const float product = source.at(i) * scales[i];
      store(target + i, scales[i] == 0.0f ? 0.0f : product);
    }
  }
}

template <class Source, class T>
void shrink_columns(Source all, T* out, const GroupRange& range) {
  for (std::int64_t col = range.begin; col < range.end; col += kColumnBlock) {
    const std::int64_t left = range.end - col;
    if (left >= kColumnBlock) {
      shrink_column_block(all.shifted(col), out + col, range, kColumnBlock);
    } else {
      shrink_column_block(all.shifted(col), out + col, range, static_cast<int>(left));
    }
  }
}

template <class Source, class T>
void shrink_groups(Source source, T* out, const GroupRange& range) {
  if (range.by_row) {
    shrink_rows(source, out, range);
  } else {
    shrink_columns(source, out, range);
  }
}

template <class T>
void threshold_body(const T* x, T* out, const GroupRange& range) {
  shrink_groups(Plain<T>{x}, out, range);
}

template <class T>
void moreau_body(T* delta, const T* grad, float decay, float gamma, const GroupRange& range) {
  const Stepped<T> source{delta, grad, decay, gamma};
  if (range.threshold > 0) return shrink_groups(source, delta, range);
  // Without a threshold the groups do not interact; begin and end count rows.
  for (std::int64_t i = range.begin * range.cols; i < range.end * range.cols; ++i) store(delta + i, source.at(i));
}

}  // namespace

template <class T>
GroupKernels<T> group_kernels() {
  return {threshold_body<T>, moreau_body<T>};
}

}  // namespace PYPRUNE_TARGET_NAMESPACE
}  // namespace pyprune
