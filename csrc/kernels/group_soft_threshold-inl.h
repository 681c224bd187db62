// Body of group_soft_threshold, compiled once per instruction set. Sums run in double over a fixed number of lanes:
// squares of float32 can neither overflow nor vanish, and the result is the same on every instruction set.
#include "kernels/storage-inl.h"

namespace pyprune {
namespace PYPRUNE_TARGET_NAMESPACE {
namespace {

constexpr int kLanes = 32;
constexpr int kColumnBlock = 64;

// The comparison is written so that a NaN norm gives a NaN scale, and so spreads over its group.
inline float shrink_scale(double squared_norm, double threshold) {
  const double norm = __builtin_sqrt(squared_norm);
  return norm <= threshold ? 0.0f : static_cast<float>(1.0 - threshold / norm);
}

template <class T>
double squared_norm(const T* x, std::int64_t count) {
  double lanes[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const double value = load(x[i + lane]);
      lanes[lane] += value * value;
    }
  }
  for (int lane = 0; i < count; ++i, ++lane) {
    const double value = load(x[i]);
    lanes[lane] += value * value;
  }
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

template <class T>
void rows_body(const T* x, T* out, std::int64_t, std::int64_t cols, double threshold, std::int64_t begin,
               std::int64_t end) {
  for (std::int64_t row = begin; row < end; ++row) {
    const T* source = x + row * cols;
    T* target = out + row * cols;
    const float scale = shrink_scale(squared_norm(source, cols), threshold);
    if (scale == 0.0f) {
      // Written, not multiplied: a removed group is exactly +0, whatever its signs were.
      for (std::int64_t i = 0; i < cols; ++i) store(target + i, 0.0f);
      continue;
    }
    for (std::int64_t i = 0; i < cols; ++i) store(target + i, load(source[i]) * scale);
  }
}

// One block of at most kColumnBlock columns: once down for the norms, once down for the product. The block is
// narrow enough for the second pass to find it in the cache.
template <class T>
void column_block(const T* x, T* out, std::int64_t rows, std::int64_t cols, double threshold, int width) {
  double sums[kColumnBlock] = {};
  float scales[kColumnBlock];
  for (std::int64_t row = 0; row < rows; ++row) {
    const T* source = x + row * cols;
    for (int i = 0; i < width; ++i) {
      const double value = load(source[i]);
      sums[i] += value * value;
    }
  }
  for (int i = 0; i < width; ++i) scales[i] = shrink_scale(sums[i], threshold);
  for (std::int64_t row = 0; row < rows; ++row) {
    const T* source = x + row * cols;
    T* target = out + row * cols;
    for (int i = 0; i < width; ++i) {
      const float product = load(source[i]) * scales[i];
      store(target + i, scales[i] == 0.0f ? 0.0f : product);
    }
  }
}

template <class T>
void columns_body(const T* x, T* out, std::int64_t rows, std::int64_t cols, double threshold, std::int64_t begin,
                  std::int64_t end) {
  for (std::int64_t col = begin; col < end; col += kColumnBlock) {
    const std::int64_t left = end - col;
    if (left >= kColumnBlock) {
      column_block(x + col, out + col, rows, cols, threshold, kColumnBlock);
    } else {
      column_block(x + col, out + col, rows, cols, threshold, static_cast<int>(left));
    }
  }
}

}  // namespace

template <class T>
GroupKernels<T> group_kernels() {
  return {rows_body<T>, columns_body<T>};
}

}  // namespace PYPRUNE_TARGET_NAMESPACE
}  // namespace pyprune
