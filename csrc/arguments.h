// The arguments of the bindings: tensors as Python hands them over, and the checks that come before raw pointers.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/common/selection.h"

namespace pyprune {

struct Tensor {
  std::uintptr_t address;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;  // in elements
  std::string dtype;
};

inline void* data(const Tensor& tensor) { return reinterpret_cast<void*>(tensor.address); }

inline DType parse_dtype(const std::string& name) {
  if (name == "float32") return DType::kFloat32;
  if (name == "bfloat16") return DType::kBFloat16;
  if (name == "float16") return DType::kFloat16;
  throw std::invalid_argument("dtype " + name + " is not supported; use float32, bfloat16 or float16");
}

inline std::int64_t bytes_per_element(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

inline std::string text(const std::vector<std::int64_t>& values) {
  std::string result = "(";
  for (std::size_t i = 0; i < values.size(); ++i) result += (i ? ", " : "") + std::to_string(values[i]);
  return result + ")";
}

inline void check_matrix(const Tensor& tensor, const char* name) {
  if (tensor.shape.size() != 2 || tensor.strides.size() != 2) {
    throw std::invalid_argument(std::string(name) + " must have 2 dimensions, not shape " + text(tensor.shape));
  }
  const std::int64_t rows = tensor.shape[0], cols = tensor.shape[1];
  if (rows < 0 || cols < 0) throw std::invalid_argument(std::string(name) + " has shape " + text(tensor.shape));
  const bool contiguous =
      rows * cols == 0 || ((cols == 1 || tensor.strides[1] == 1) && (rows == 1 || tensor.strides[0] == cols));
  if (!contiguous) {
    throw std::invalid_argument(std::string(name) + " must be contiguous (row-major); its shape is " +
                                text(tensor.shape) + " and its strides are " + text(tensor.strides));
  }
  if (rows * cols > 0 && tensor.address == 0) throw std::invalid_argument(std::string(name) + " has no data");
}

// Equal or disjoint memory: a kernel that reads ahead of what it writes would corrupt anything in between.
inline void check_overlap(const Tensor& x, const Tensor& out, std::uintptr_t bytes) {
  if (x.address == out.address) return;
  if (x.address < out.address + bytes && out.address < x.address + bytes) {
    throw std::invalid_argument("tensors overlap in part; pass separate ones");
  }
}

inline void check_same(const Tensor& x, const char* x_name, const Tensor& other, const char* other_name) {
  check_matrix(x, x_name);
  check_matrix(other, other_name);
  const std::string first(x_name), second(other_name);
  if (x.shape != other.shape) {
    throw std::invalid_argument(second + " has shape " + text(other.shape) + ", " + first + " has " + text(x.shape));
  }
  if (x.dtype != other.dtype) {
    throw std::invalid_argument(second + " is " + other.dtype + ", " + first + " is " + x.dtype);
  }
}

inline void check_threshold(double threshold) {
  if (!std::isfinite(threshold) || threshold < 0) {
    throw std::invalid_argument("threshold is " + std::to_string(threshold) + ", must be finite and >= 0");
  }
}

inline void check_threads(int threads) {
  if (threads < 1) throw std::invalid_argument("threads is " + std::to_string(threads) + ", must be at least 1");
}

inline float finite(float value, const char* name) {
  if (!std::isfinite(value)) {
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + ", must be finite");
  }
  return value;
}

// The memory of a contiguous tensor with this dtype, `count` elements; null when there are none.
inline void* memory(const Tensor& tensor, const char* name, const char* dtype, std::int64_t count) {
  std::int64_t elements = 1, expected = 1;
  bool contiguous = tensor.shape.size() == tensor.strides.size();
  for (std::int64_t size : tensor.shape) elements *= size;
  for (std::size_t d = tensor.shape.size(); contiguous && elements > 0 && d-- > 0; expected *= tensor.shape[d]) {
    contiguous = tensor.shape[d] == 1 || tensor.strides[d] == expected;
  }
  if (!contiguous || tensor.dtype != dtype || elements != count || (count > 0 && tensor.address == 0)) {
    throw std::invalid_argument(std::string(name) + " must be contiguous " + dtype + " with " + std::to_string(count) +
                                " elements; it is " + tensor.dtype + " of shape " + text(tensor.shape) +
                                " and strides " + text(tensor.strides));
  }
  return data(tensor);
}

// The elements of an index; `count` is set to how many there are.
inline const std::int64_t* index_values(const Tensor& index, const char* name, std::int64_t* count) {
  *count = index.shape.size() == 1 ? index.shape[0] : -1;
  return static_cast<const std::int64_t*>(memory(index, name, "int64", *count));
}

// The elements of an index, all checked to be in [0, size).
inline const std::int64_t* positions(const Tensor& index, const char* name, std::int64_t size, std::int64_t* count) {
  const std::int64_t* values = index_values(index, name, count);
  for (std::int64_t i = 0; i < *count; ++i) {
    if (values[i] < 0 || values[i] >= size) throw std::invalid_argument(std::string(name) + " is out of range");
  }
  return values;
}

// The elements of an optional index; without one null, which stands for all `size` positions.
inline const std::int64_t* positions(const std::optional<Tensor>& index, const char* name, std::int64_t size,
                                     std::int64_t* count) {
  if (!index) {
    *count = size;
    return nullptr;
  }
  return positions(*index, name, size, count);
}

inline void* optional_vector(const std::optional<Tensor>& tensor, const char* name, const Tensor& x) {
  return tensor ? memory(*tensor, name, x.dtype.c_str(), x.shape[1]) : nullptr;
}

// Every row (axis 0) or column of a matrix.
inline Selection all_groups(const Tensor& x, int axis, int threads) {
  if (axis != 0 && axis != 1) throw std::invalid_argument("axis is " + std::to_string(axis) + ", must be 0 or 1");
  check_threads(threads);
  return {x.shape[0], x.shape[1], axis == 0, nullptr, x.shape[static_cast<std::size_t>(axis)], 0.0f,
          parse_dtype(x.dtype), threads};
}

// The size of the whole matrix.
inline std::int64_t bytes_of(const Selection& groups) {
  return groups.rows * groups.cols * bytes_per_element(groups.dtype);
}

// The rows (axis 0) or columns that an index names. Repeated positions are the caller's to exclude.
inline Selection selected_groups(const Tensor& w, const Tensor& index, int axis, float offset, int threads) {
  check_matrix(w, "w");
  Selection selected = all_groups(w, axis, threads);
  selected.offset = finite(offset, "offset");
  selected.index = positions(index, "index", selected.count, &selected.count);
  return selected;
}

}  // namespace pyprune
