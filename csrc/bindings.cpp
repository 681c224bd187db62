// pybind11 only: checks, then raw pointers. A tensor arrives as (address, shape, strides, dtype name), so that this
// file and the kernels know nothing of torch and keep working across its versions.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "dispatch.h"
#include "kernels/group_step.h"
#include "kernels/index_set.h"
#include "kernels/perturb.h"

namespace py = pybind11;

namespace pyprune {
namespace {

struct Tensor {
  std::uintptr_t address;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;  // in elements
  std::string dtype;
};

DType parse_dtype(const std::string& name) {
  if (name == "float32") return DType::kFloat32;
  if (name == "bfloat16") return DType::kBFloat16;
  if (name == "float16") return DType::kFloat16;
  throw std::invalid_argument("dtype " + name + " is not supported; use float32, bfloat16 or float16");
}

std::int64_t bytes_per_element(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

std::string text(const std::vector<std::int64_t>& values) {
  std::string result = "(";
  for (std::size_t i = 0; i < values.size(); ++i) result += (i ? ", " : "") + std::to_string(values[i]);
  return result + ")";
}

void check_matrix(const Tensor& tensor, const char* name) {
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
void check_overlap(const Tensor& x, const Tensor& out, std::uintptr_t bytes) {
  if (x.address == out.address) return;
  if (x.address < out.address + bytes && out.address < x.address + bytes) {
    throw std::invalid_argument("tensors overlap in part; pass separate ones");
  }
}

void check_same(const Tensor& x, const char* x_name, const Tensor& other, const char* other_name) {
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

void check_threshold(double threshold) {
  if (!std::isfinite(threshold) || threshold < 0) {
    throw std::invalid_argument("threshold is " + std::to_string(threshold) + ", must be finite and >= 0");
  }
}

GroupMatrix group_matrix(const Tensor& x, int axis, int threads) {
  if (axis != 0 && axis != 1) throw std::invalid_argument("axis is " + std::to_string(axis) + ", must be 0 or 1");
  if (threads < 1) throw std::invalid_argument("threads is " + std::to_string(threads) + ", must be at least 1");
  return {x.shape[0], x.shape[1], axis == 0, parse_dtype(x.dtype), threads};
}

std::int64_t bytes_of(const GroupMatrix& matrix) {
  return matrix.rows * matrix.cols * bytes_per_element(matrix.dtype);
}

void bind_group_soft_threshold(const Tensor& x, const Tensor& out, double threshold, int axis, int threads) {
  check_same(x, "x", out, "out");
  check_threshold(threshold);
  const GroupMatrix matrix = group_matrix(x, axis, threads);
  check_overlap(x, out, bytes_of(matrix));
  if (bytes_of(matrix) == 0) return;
  const py::gil_scoped_release released;
  group_soft_threshold(reinterpret_cast<const void*>(x.address), reinterpret_cast<void*>(out.address), threshold,
                       matrix);
}

void bind_moreau_step(const Tensor& delta, const Tensor& grad, float decay, float gamma, double threshold, int axis,
                      int threads) {
  check_same(delta, "delta", grad, "grad");
  check_threshold(threshold);
  const GroupMatrix matrix = group_matrix(delta, axis, threads);
  check_overlap(delta, grad, bytes_of(matrix));
  if (bytes_of(matrix) == 0) return;
  const py::gil_scoped_release released;
  moreau_step(reinterpret_cast<void*>(delta.address), reinterpret_cast<const void*>(grad.address), decay, gamma,
              threshold, matrix);
}

void bind_perturb(const Tensor& w0, const Tensor& delta, const Tensor& out, float sigma, std::uint64_t seed,
                  std::uint64_t offset, int threads) {
  check_same(w0, "w0", delta, "delta");
  check_same(w0, "w0", out, "out");
  const GroupMatrix matrix = group_matrix(w0, 0, threads);
  check_overlap(w0, out, bytes_of(matrix));
  check_overlap(delta, out, bytes_of(matrix));
  if (bytes_of(matrix) == 0) return;
  const py::gil_scoped_release released;
  perturb(reinterpret_cast<const void*>(w0.address), reinterpret_cast<const void*>(delta.address),
          reinterpret_cast<void*>(out.address), matrix.rows * matrix.cols, matrix.dtype, {sigma, seed, offset}, threads);
}

// `index` must outlive the result. Repeated positions are the caller's to exclude; they are safe on one thread only.
Selection selection(const Tensor& w, int axis, const std::vector<std::int64_t>& index, int threads) {
  const GroupMatrix matrix = group_matrix(w, axis, threads);
  const std::int64_t groups = matrix.by_row ? matrix.rows : matrix.cols;
  for (const std::int64_t k : index) {
    if (k < 0 || k >= groups) {
      throw std::invalid_argument("index " + std::to_string(k) + " is out of range, there are " +
                                  std::to_string(groups) + " groups");
    }
  }
  return {matrix.rows, matrix.cols, matrix.by_row, index.data(), static_cast<std::int64_t>(index.size()),
          matrix.dtype, threads};
}

std::vector<std::int64_t> index_of(const Tensor& index) {
  if (index.shape.size() != 1 || index.dtype != "int64" || (index.shape[0] > 1 && index.strides[0] != 1)) {
    throw std::invalid_argument("index must be contiguous int64 of one dimension");
  }
  const auto* begin = reinterpret_cast<const std::int64_t*>(index.address);
  return std::vector<std::int64_t>(begin, begin + index.shape[0]);
}

double bind_group_penalty(const Tensor& w, const Tensor& index, int axis, bool l1, const Tensor* grad, double strength,
                          int threads) {
  check_matrix(w, "w");
  const std::vector<std::int64_t> positions = index_of(index);
  const Selection selected = selection(w, axis, positions, threads);
  if (grad != nullptr) {
    check_same(w, "w", *grad, "grad");
    const std::int64_t bytes = w.shape[0] * w.shape[1] * bytes_per_element(selected.dtype);
    if (bytes > 0 && w.address == grad->address) throw std::invalid_argument("grad is w");
    check_overlap(w, *grad, bytes);
  }
  void* const gradient = grad == nullptr ? nullptr : reinterpret_cast<void*>(grad->address);
  const py::gil_scoped_release released;
  return group_penalty(reinterpret_cast<const void*>(w.address), gradient, strength, l1, selected);
}

void bind_group_prox(const Tensor& w, const Tensor& index, int axis, bool l1, double threshold, int threads) {
  check_matrix(w, "w");
  check_threshold(threshold);
  const std::vector<std::int64_t> positions = index_of(index);
  const Selection selected = selection(w, axis, positions, threads);
  const py::gil_scoped_release released;
  group_prox(reinterpret_cast<void*>(w.address), threshold, l1, selected);
}

void bind_shrink(const Tensor& w, const Tensor& index, int axis, float factor, int threads) {
  check_matrix(w, "w");
  const std::vector<std::int64_t> positions = index_of(index);
  const Selection selected = selection(w, axis, positions, threads);
  const py::gil_scoped_release released;
  shrink(reinterpret_cast<void*>(w.address), factor, selected);
}

std::vector<double> bind_group_importance(const Tensor& score, const Tensor& w, int axis, int threads) {
  check_same(score, "score", w, "w");
  const GroupMatrix matrix = group_matrix(w, axis, threads);
  std::vector<std::int64_t> every(matrix.by_row ? matrix.rows : matrix.cols);
  for (std::size_t i = 0; i < every.size(); ++i) every[i] = static_cast<std::int64_t>(i);
  const Selection selected = selection(w, axis, every, threads);
  std::vector<double> sums(every.size());
  const py::gil_scoped_release released;
  group_importance(reinterpret_cast<const void*>(score.address), reinterpret_cast<const void*>(w.address), sums.data(),
                   selected);
  return sums;
}

std::vector<std::string> names_of(const std::vector<Isa>& isas) {
  std::vector<std::string> names;
  for (Isa isa : isas) names.emplace_back(isa_name(isa));
  return names;
}

}  // namespace
}  // namespace pyprune

PYBIND11_MODULE(_C, module) {
  using namespace pyprune;
  module.doc() = "Compiled kernels of pyprune.ops. Call the ops, not this module.";

  py::class_<Tensor>(module, "Tensor", "A view of memory: address, shape, strides in elements, dtype name.")
      .def(py::init<std::uintptr_t, std::vector<std::int64_t>, std::vector<std::int64_t>, std::string>(),
           py::arg("address"), py::arg("shape"), py::arg("strides"), py::arg("dtype"));

  module.def("active_isa", [] { return isa_name(active_isa()); }, "The instruction set that the kernels run on.");
  module.def("available_isas", [] { return names_of(available_isas()); }, "What this CPU can run, lowest first.");
  module.def("set_isa", &set_isa, py::arg("name"), "Choose an instruction set; 'auto' restores the best one.");
#ifdef _OPENMP
  module.attr("openmp") = true;
#else
  module.attr("openmp") = false;
#endif

  module.def("group_soft_threshold", &bind_group_soft_threshold, py::arg("x"), py::arg("out"),
             py::arg("threshold"), py::arg("axis"), py::arg("threads"));
  module.def("moreau_step", &bind_moreau_step, py::arg("delta"), py::arg("grad"), py::arg("decay"),
             py::arg("gamma"), py::arg("threshold"), py::arg("axis"), py::arg("threads"));

  module.def("perturb", &bind_perturb, py::arg("w0"), py::arg("delta"), py::arg("out"), py::arg("sigma"),
             py::arg("seed"), py::arg("offset"), py::arg("threads"));
  module.def("group_penalty", &bind_group_penalty, py::arg("w"), py::arg("index"), py::arg("axis"), py::arg("l1"),
             py::arg("grad").none(true), py::arg("strength"), py::arg("threads"));
  module.def("group_prox", &bind_group_prox, py::arg("w"), py::arg("index"), py::arg("axis"), py::arg("l1"),
             py::arg("threshold"), py::arg("threads"));
  module.def("shrink", &bind_shrink, py::arg("w"), py::arg("index"), py::arg("axis"), py::arg("factor"),
             py::arg("threads"));
  module.def("group_importance", &bind_group_importance, py::arg("score"), py::arg("w"), py::arg("axis"),
             py::arg("threads"));
}
