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
#include "kernels/group_soft_threshold.h"

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
void check_overlap(const Tensor& x, const Tensor& out, std::int64_t bytes) {
  if (x.address == out.address) return;
  if (x.address < out.address + bytes && out.address < x.address + bytes) {
    throw std::invalid_argument("x and out overlap in part; pass the same tensor or a separate one");
  }
}

void check_threads(int threads) {
  if (threads < 1) throw std::invalid_argument("threads is " + std::to_string(threads) + ", must be at least 1");
}

void bind_group_soft_threshold(const Tensor& x, const Tensor& out, double threshold, int axis, int threads) {
  check_matrix(x, "x");
  check_matrix(out, "out");
  if (x.shape != out.shape) {
    throw std::invalid_argument("out has shape " + text(out.shape) + ", x has " + text(x.shape));
  }
  if (x.dtype != out.dtype) throw std::invalid_argument("out is " + out.dtype + ", x is " + x.dtype);
  if (!std::isfinite(threshold) || threshold < 0) {
    throw std::invalid_argument("threshold is " + std::to_string(threshold) + ", must be finite and >= 0");
  }
  if (axis != 0 && axis != 1) throw std::invalid_argument("axis is " + std::to_string(axis) + ", must be 0 or 1");
  check_threads(threads);
  const DType dtype = parse_dtype(x.dtype);
  const std::int64_t elements = x.shape[0] * x.shape[1];
  check_overlap(x, out, elements * bytes_per_element(dtype));
  if (elements == 0) return;
  const py::gil_scoped_release released;
  group_soft_threshold(reinterpret_cast<const void*>(x.address), reinterpret_cast<void*>(out.address), x.shape[0],
                       x.shape[1], threshold, axis == 0, dtype, threads);
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
}
