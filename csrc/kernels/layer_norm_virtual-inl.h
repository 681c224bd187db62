// Bodies of the LayerNorm with a virtual size, compiled once per instruction set.
#include "kernels/common/lanes-inl.h"

namespace pyprune {
namespace PYPRUNE_TARGET_NAMESPACE {
namespace {

template <class T>
void norm_forward(const T* x, const T* weight, const T* bias, float eps, T* out, float* means, float* rstds,
                  const NormShape& shape, std::int64_t begin, std::int64_t end) {
  const std::int64_t n = shape.cols;
  const double d = static_cast<double>(shape.norm_size), missing = d - static_cast<double>(n);
  for (std::int64_t row = begin; row < end; ++row) {
    const T* from = x + row * n;
    T* __restrict to = out + row * n;
    const double exact_mean = lane_sum(n, [&](std::int64_t i) { return static_cast<double>(load(from[i])); }) / d;
    const double squares = lane_sum(n, [&](std::int64_t i) {
      const double centred = load(from[i]) - exact_mean;
      return centred * centred;
    });
    const double variance = (squares + missing * exact_mean * exact_mean) / d;
    const float mean = static_cast<float>(exact_mean);
    const float rstd = static_cast<float>(1.0 / __builtin_sqrt(variance + eps));
    means[row] = mean;
    rstds[row] = rstd;
    if (bias == nullptr) {
      for (std::int64_t i = 0; i < n; ++i) store(to + i, (load(from[i]) - mean) * rstd * load(weight[i]));
    } else {
      for (std::int64_t i = 0; i < n; ++i) {
        store(to + i, (load(from[i]) - mean) * rstd * load(weight[i]) + load(bias[i]));
      }
    }
  }
}

// dx = rstd (g - sum(g)/d - xhat sum(g xhat)/d) with g = grad * weight: the gradient of a LayerNorm over d channels.
template <class T>
void norm_backward(const T* grad, const T* x, const T* weight, const float* means, const float* rstds, T* grad_x,
                   const NormShape& shape, std::int64_t begin, std::int64_t end) {
  const std::int64_t n = shape.cols;
  const double d = static_cast<double>(shape.norm_size);
  for (std::int64_t row = begin; row < end; ++row) {
    const T *slope = grad + row * n, *from = x + row * n;
    T* __restrict to = grad_x + row * n;
    const float mean = means[row], rstd = rstds[row];
    const double sum = lane_sum(n, [&](std::int64_t i) {
      return static_cast<double>(load(slope[i]) * load(weight[i]));
    });
    const double product = lane_sum(n, [&](std::int64_t i) {
      const float normal = (load(from[i]) - mean) * rstd;
      return static_cast<double>(load(slope[i]) * load(weight[i]) * normal);
    });
    const float shift = static_cast<float>(sum / d), tilt = static_cast<float>(product / d);
    for (std::int64_t i = 0; i < n; ++i) {
      const float normal = (load(from[i]) - mean) * rstd;
      store(to + i, rstd * (load(slope[i]) * load(weight[i]) - shift - normal * tilt));
    }
  }
}

// Adds the rows' shares of the gradients of weight and bias to two arrays of doubles.
template <class T>
void norm_parameter_sums(const T* grad, const T* x, const float* means, const float* rstds, double* __restrict weight,
                         double* __restrict bias, const NormShape& shape, std::int64_t begin, std::int64_t end) {
  const std::int64_t n = shape.cols;
  for (std::int64_t row = begin; row < end; ++row) {
    const T *slope = grad + row * n, *from = x + row * n;
    const float mean = means[row], rstd = rstds[row];
    for (std::int64_t i = 0; i < n; ++i) {
      const float one = load(slope[i]);
      weight[i] += one * ((load(from[i]) - mean) * rstd);
      bias[i] += one;
    }
  }
}

template <class T>
void norm_store(const double* from, T* to, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) store(to + i, static_cast<float>(from[i]));
}

}  // namespace

template <class T>
NormKernels<T> norm_kernels() {
  return {norm_forward<T>, norm_backward<T>, norm_parameter_sums<T>, norm_store<T>};
}

}  // namespace PYPRUNE_TARGET_NAMESPACE
}  // namespace pyprune
