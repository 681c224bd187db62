// Bodies of the residual-difference norm, compiled once per instruction set.
#include "kernels/common/lanes-inl.h"

namespace pyprune {
namespace PYPRUNE_TARGET_NAMESPACE {
namespace {

template <bool kL1>
inline double term(float difference) {
  const double value = difference;
  return kL1 ? (value < 0 ? -value : value) : value * value;
}

template <class T, bool kL1>
double row_sum(const T* __restrict a, const T* __restrict b, std::int64_t count) {
  return lane_sum(count, [&](std::int64_t i) { return term<kL1>(load(b[i]) - load(a[i])); });
}

template <class T>
void diff_forward(const T* x_in, const T* x_out, float* norms, std::int64_t cols, bool l1, std::int64_t begin,
                  std::int64_t end) {
  for (std::int64_t row = begin; row < end; ++row) {
    const T *a = x_in + row * cols, *b = x_out + row * cols;
    norms[row] = static_cast<float>(l1 ? row_sum<T, true>(a, b, cols)
                                       : __builtin_sqrt(row_sum<T, false>(a, b, cols)));
  }
}

template <class T, bool kL1, bool kIn, bool kOut>
void gradient_row(const T* __restrict a, const T* __restrict b, float scale, T* __restrict in, T* __restrict out,
                  std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    const float difference = load(b[i]) - load(a[i]);
    const float sign = difference > 0 ? scale : (difference < 0 ? -scale : 0.0f);
    const float value = kL1 ? sign : difference * scale;
    if (kOut) store(out + i, value);
    if (kIn) store(in + i, -value);
  }
}

template <class T, bool kL1>
void gradient_row(const T* a, const T* b, float scale, T* in, T* out, std::int64_t count) {
  if (in != nullptr && out != nullptr) return gradient_row<T, kL1, true, true>(a, b, scale, in, out, count);
  if (in != nullptr) return gradient_row<T, kL1, true, false>(a, b, scale, in, out, count);
  gradient_row<T, kL1, false, true>(a, b, scale, in, out, count);
}

template <class T>
void diff_backward(const T* x_in, const T* x_out, const float* norms, double scale, T* grad_in, T* grad_out,
                   std::int64_t cols, bool l1, std::int64_t begin, std::int64_t end) {
  for (std::int64_t row = begin; row < end; ++row) {
    const std::int64_t at = row * cols;
    T* in = grad_in == nullptr ? nullptr : grad_in + at;
    T* out = grad_out == nullptr ? nullptr : grad_out + at;
    if (l1) {
      gradient_row<T, true>(x_in + at, x_out + at, static_cast<float>(scale), in, out, cols);
    } else {
      // A row without a difference has gradient 0.
      const float factor = norms[row] == 0 ? 0.0f : static_cast<float>(scale / norms[row]);
      gradient_row<T, false>(x_in + at, x_out + at, factor, in, out, cols);
    }
  }
}

}  // namespace

template <class T>
DiffKernels<T> diff_kernels() {
  return {diff_forward<T>, diff_backward<T>};
}

}  // namespace PYPRUNE_TARGET_NAMESPACE
}  // namespace pyprune
