// pybind11 only: checks (arguments.h), then raw pointers. A tensor arrives as (address, shape, strides, dtype name), so
// that this file and the kernels know nothing of torch and keep working across its versions.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "arguments.h"
#include "dispatch.h"
#include "kernels/group_importance.h"
#include "kernels/group_penalty.h"
#include "kernels/group_soft_threshold.h"
#include "kernels/layer_norm_virtual.h"
#include "kernels/moreau_step.h"
#include "kernels/perturb.h"
#include "kernels/regularised_adamw.h"
#include "kernels/residual_diff_norm.h"
#include "kernels/slice_gather.h"

namespace py = pybind11;

namespace pyprune {
namespace {

// Returns the sums of squares of the change and of the new values.
std::tuple<double, double> bind_moreau_step(const Tensor& delta, const Tensor& grad, float decay, float gamma,
                                            double threshold, int axis, int threads) {
  check_same(delta, "delta", grad, "grad");
  check_threshold(threshold);
  const Selection groups = all_groups(delta, axis, threads);
  check_overlap(delta, grad, bytes_of(groups));
  if (bytes_of(groups) == 0) return {0.0, 0.0};
  const py::gil_scoped_release released;
  const StepSums sums = moreau_step(data(delta), data(grad), {decay, gamma, threshold}, groups);
  return {sums.moved, sums.size};
}

void bind_perturb(const Tensor& w0, const Tensor& delta, const Tensor& out, float sigma, std::uint64_t seed,
                  std::uint64_t offset, int threads) {
  check_same(w0, "w0", delta, "delta");
  check_same(w0, "w0", out, "out");
  const Selection groups = all_groups(w0, 0, threads);
  check_overlap(w0, out, bytes_of(groups));
  check_overlap(delta, out, bytes_of(groups));
  if (bytes_of(groups) == 0) return;
  const py::gil_scoped_release released;
  perturb(data(w0), data(delta), data(out), groups.rows * groups.cols, groups.dtype, {sigma, seed, offset}, threads);
}

AdamPenalty parse_penalty(const std::string& name) {
  if (name == "l1") return AdamPenalty::kL1;
  if (name == "l2") return AdamPenalty::kL2;
  throw std::invalid_argument("unknown penalty " + name);
}

struct BoundAdamTensor {
  AdamTensor tensor;
  std::string dtype;
  bool quantised;
};

// state: first, second, and for coded moments their scales. scalars: decay, rate1, beta2, rate2, step_size,
// root_correction, eps, gradient_scale.
BoundAdamTensor bind_adam_tensor(const Tensor& weight, const Tensor& gradient, const std::vector<Tensor>& state,
                                 const std::vector<float>& scalars, std::uint32_t step, std::uint32_t stream,
                                 const std::string& penalty, const Tensor& index, bool by_row, double penalty_weight,
                                 float offset) {
  check_same(weight, "weight", gradient, "gradient");
  if ((state.size() != 2 && state.size() != 4) || scalars.size() != 8) {
    throw std::invalid_argument("state must hold 2 or 4 tensors and scalars 8 numbers");
  }
  const bool quantised = state.size() == 4;
  const std::int64_t rows = weight.shape[0], cols = weight.shape[1], count = rows * cols;
  const std::int64_t blocks = (count + kAdamBlock - 1) / kAdamBlock;
  const char* moments = quantised ? "uint8" : "float32";
  AdamTensor t{};
  t.weight = data(weight);
  t.gradient = data(gradient);
  t.first = memory(state[0], "the first moment", moments, count);
  t.second = memory(state[1], "the second moment", moments, count);
  if (quantised) {
    t.first_scale = static_cast<float*>(memory(state[2], "the first moment's scales", "float32", blocks));
    t.second_scale = static_cast<float*>(memory(state[3], "the second moment's scales", "float32", blocks));
  }
  t.rows = rows;
  t.cols = cols;
  t.penalty = parse_penalty(penalty);
  t.by_row = by_row;
  t.index = positions(index, "index", by_row ? rows : cols, &t.index_count);
  check_threshold(penalty_weight);
  t.penalty_weight = penalty_weight;
  t.offset = offset;
  float* targets[8] = {&t.decay,     &t.rate1,           &t.beta2, &t.rate2,
                       &t.step_size, &t.root_correction, &t.eps,   &t.gradient_scale};
  for (int i = 0; i < 8; ++i) *targets[i] = scalars[static_cast<std::size_t>(i)];
  t.step = step;
  t.stream = stream;
  check_overlap(weight, gradient, static_cast<std::uintptr_t>(count * bytes_per_element(parse_dtype(weight.dtype))));
  if (count > 0 && weight.address == gradient.address) throw std::invalid_argument("weight and gradient are one");
  return {t, weight.dtype, quantised};
}

void bind_regularised_adamw(const std::vector<BoundAdamTensor>& bound, std::uint64_t seed, bool stochastic,
                            int threads) {
  check_threads(threads);
  if (bound.empty()) return;
  std::vector<AdamTensor> tensors;
  for (const BoundAdamTensor& one : bound) {
    if (one.dtype != bound[0].dtype || one.quantised != bound[0].quantised) {
      throw std::invalid_argument("the tensors of one call must agree in dtype and in how their moments are stored");
    }
    tensors.push_back(one.tensor);
  }
  const DType dtype = parse_dtype(bound[0].dtype);
  const AdamOptions options{dtype, bound[0].quantised, stochastic && dtype == DType::kBFloat16, seed, threads};
  const py::gil_scoped_release released;
  regularised_adamw(tensors, options);
}

DiffShape diff_shape(const Tensor& x_in, const Tensor& x_out, const std::string& kind, int threads) {
  check_same(x_in, "x_in", x_out, "x_out");
  check_threads(threads);
  if (kind != "l1" && kind != "l2") throw std::invalid_argument("kind is " + kind + ", must be l1 or l2");
  return {x_in.shape[0], x_in.shape[1], kind == "l1", parse_dtype(x_in.dtype), threads};
}

double bind_residual_diff_norm(const Tensor& x_in, const Tensor& x_out, const Tensor& norms, const std::string& kind,
                               int threads) {
  const DiffShape shape = diff_shape(x_in, x_out, kind, threads);
  float* target = static_cast<float*>(memory(norms, "norms", "float32", shape.rows));
  const py::gil_scoped_release released;
  return residual_diff_norm(data(x_in), data(x_out), target, shape);
}

void bind_residual_diff_norm_gradient(const Tensor& x_in, const Tensor& x_out, const Tensor& norms, double scale,
                                      const std::string& kind, const std::optional<Tensor>& grad_in,
                                      const std::optional<Tensor>& grad_out, int threads) {
  const DiffShape shape = diff_shape(x_in, x_out, kind, threads);
  const float* source = static_cast<const float*>(memory(norms, "norms", "float32", shape.rows));
  const auto target = [&](const std::optional<Tensor>& tensor, const char* name) -> void* {
    if (!tensor) return nullptr;
    check_same(x_in, "x_in", *tensor, name);
    return data(*tensor);
  };
  void *in = target(grad_in, "grad_in"), *out = target(grad_out, "grad_out");
  if (in == nullptr && out == nullptr) return;
  const py::gil_scoped_release released;
  residual_diff_norm_gradient(data(x_in), data(x_out), source, scale, in, out, shape);
}

NormShape norm_shape(const Tensor& x, std::int64_t norm_size, int threads) {
  check_matrix(x, "x");
  check_threads(threads);
  if (norm_size < x.shape[1] || norm_size < 1) {
    throw std::invalid_argument("norm_size is " + std::to_string(norm_size) + ", less than the stored channels");
  }
  return {x.shape[0], x.shape[1], norm_size, parse_dtype(x.dtype), threads};
}

void bind_layer_norm_virtual(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, float eps,
                             std::int64_t norm_size, const Tensor& out, const Tensor& mean, const Tensor& rstd,
                             int threads) {
  const NormShape shape = norm_shape(x, norm_size, threads);
  check_same(x, "x", out, "out");
  const void *scale = optional_vector(weight, "weight", x), *shift = optional_vector(bias, "bias", x);
  float* means = static_cast<float*>(memory(mean, "mean", "float32", shape.rows));
  float* rstds = static_cast<float*>(memory(rstd, "rstd", "float32", shape.rows));
  const py::gil_scoped_release released;
  layer_norm_virtual(data(x), scale, shift, eps, data(out), means, rstds, shape);
}

void bind_layer_norm_virtual_gradient(const Tensor& grad, const Tensor& x, const Tensor& weight, std::int64_t norm_size,
                                      const Tensor& mean, const Tensor& rstd, const std::optional<Tensor>& grad_x,
                                      const std::optional<Tensor>& grad_weight,
                                      const std::optional<Tensor>& grad_bias, int threads) {
  const NormShape shape = norm_shape(x, norm_size, threads);
  check_same(x, "x", grad, "grad");
  if (grad_x) check_same(x, "x", *grad_x, "grad_x");
  const void* scale = optional_vector(weight, "weight", x);
  void* to_weight = optional_vector(grad_weight, "grad_weight", x);
  void* to_bias = optional_vector(grad_bias, "grad_bias", x);
  const float* means = static_cast<const float*>(memory(mean, "mean", "float32", shape.rows));
  const float* rstds = static_cast<const float*>(memory(rstd, "rstd", "float32", shape.rows));
  const py::gil_scoped_release released;
  layer_norm_virtual_gradient(data(grad), data(x), scale, means, rstds, grad_x ? data(*grad_x) : nullptr, to_weight,
                              to_bias, shape);
}

// The least and the greatest position of a non-empty index, and whether one occurs twice if all are in [0, size).
std::tuple<std::int64_t, std::int64_t, bool> index_facts(const Tensor& index, std::int64_t size) {
  std::int64_t count;
  const std::int64_t* values = index_values(index, "index", &count);
  if (count < 1) throw std::invalid_argument("index is empty");
  const auto [low, high] = std::minmax_element(values, values + count);
  if (*low < 0 || *high >= size) return {*low, *high, false};
  std::vector<char> seen(static_cast<std::size_t>(size));
  bool repeated = false;
  for (std::int64_t i = 0; i < count; ++i) {
    char& mark = seen[static_cast<std::size_t>(values[i])];
    repeated |= mark != 0;
    mark = 1;
  }
  return {*low, *high, repeated};
}

double bind_group_penalty(const Tensor& w, const Tensor& index, int axis, bool l1, const std::optional<Tensor>& grad,
                          double penalty_weight, float offset, int threads) {
  const Selection selected = selected_groups(w, index, axis, offset, threads);
  void* gradient = nullptr;
  if (grad) {
    check_same(w, "w", *grad, "grad");
    const std::int64_t bytes = bytes_of(selected);
    if (bytes > 0 && w.address == grad->address) throw std::invalid_argument("grad is w");
    check_overlap(w, *grad, static_cast<std::uintptr_t>(bytes));
    gradient = data(*grad);
  }
  const py::gil_scoped_release released;
  return group_penalty(data(w), gradient, penalty_weight, l1, selected);
}

void bind_group_soft_threshold(const Tensor& w, const Tensor& index, int axis, double threshold, float offset,
                               int threads) {
  const Selection selected = selected_groups(w, index, axis, offset, threads);
  check_threshold(threshold);
  const py::gil_scoped_release released;
  group_soft_threshold(data(w), threshold, selected);
}

void bind_group_importance(const Tensor& score, const Tensor& w, int axis, bool is_signed, float offset,
                           const Tensor& out, int threads) {
  check_same(score, "score", w, "w");
  Selection groups = all_groups(w, axis, threads);
  groups.offset = finite(offset, "offset");
  double* const sums = static_cast<double*>(memory(out, "out", "float64", groups.count));
  const py::gil_scoped_release released;
  const std::vector<double> values = group_importance(data(score), data(w), is_signed, groups);
  std::copy(values.begin(), values.end(), sums);
}

// Elements are bits: uint8, int16, int32 or int64, whatever the tensor's own dtype is; or, with a scale, floats.
void bind_slice_gather(const Tensor& w, const Tensor& out, const std::optional<Tensor>& rows,
                       const std::optional<Tensor>& columns, std::optional<float> scale, float offset, int threads) {
  check_threads(threads);
  check_matrix(out, "out");
  if (w.shape.size() != 2 || w.strides.size() != 2 || w.shape[0] < 0 || w.shape[1] < 0) {
    throw std::invalid_argument("w must have 2 dimensions, not shape " + text(w.shape));
  }
  if ((w.shape[1] > 1 && w.strides[1] != 1) || w.strides[0] < 0) {
    throw std::invalid_argument("w must have neighbouring columns; its strides are " + text(w.strides));
  }
  Gather gather{};
  gather.rows = positions(rows, "rows", w.shape[0], &gather.row_count);
  gather.cols = positions(columns, "columns", w.shape[1], &gather.col_count);
  gather.row_stride = w.strides[0];
  gather.threads = threads;
  if (out.shape[0] != gather.row_count || out.shape[1] != gather.col_count || out.dtype != w.dtype) {
    throw std::invalid_argument("out is " + out.dtype + " of shape " + text(out.shape) + ", which does not fit");
  }
  if (gather.row_count * gather.col_count == 0) return;
  const void* from = data(w);
  void* to = data(out);
  if (scale) {
    const DType dtype = parse_dtype(w.dtype);
    const py::gil_scoped_release released;
    return slice_gather_scaled(from, to, dtype, *scale, offset, gather);
  }
  const int bytes = w.dtype == "uint8" ? 1 : w.dtype == "int16" ? 2 : w.dtype == "int32" ? 4 : 8;
  if (bytes == 8 && w.dtype != "int64") throw std::invalid_argument("w is " + w.dtype + "; pass its bits as integers");
  const py::gil_scoped_release released;
  slice_gather(from, to, bytes, gather);
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

  module.def("index_facts", &index_facts, py::arg("index"), py::arg("size"),
             "Least and greatest position, and whether one occurs twice.");
  module.def("moreau_step", &bind_moreau_step, py::arg("delta"), py::arg("grad"), py::arg("decay"),
             py::arg("gamma"), py::arg("threshold"), py::arg("axis"), py::arg("threads"));

  module.def("perturb", &bind_perturb, py::arg("w0"), py::arg("delta"), py::arg("out"), py::arg("sigma"),
             py::arg("seed"), py::arg("offset"), py::arg("threads"));
  module.def("group_penalty", &bind_group_penalty, py::arg("w"), py::arg("index"), py::arg("axis"), py::arg("l1"),
             py::arg("grad"), py::arg("penalty_weight"), py::arg("offset"), py::arg("threads"));
  module.def("group_soft_threshold", &bind_group_soft_threshold, py::arg("w"), py::arg("index"), py::arg("axis"),
             py::arg("threshold"), py::arg("offset"), py::arg("threads"));
  module.def("group_importance", &bind_group_importance, py::arg("score"), py::arg("w"), py::arg("axis"),
             py::arg("is_signed"), py::arg("offset"), py::arg("out"), py::arg("threads"));
  py::class_<BoundAdamTensor>(module, "AdamTensor", "One weight of regularised_adamw with everything that it needs.")
      .def(py::init(&bind_adam_tensor), py::arg("weight"), py::arg("gradient"), py::arg("state"), py::arg("scalars"),
           py::arg("step"), py::arg("stream"), py::arg("penalty"), py::arg("index"), py::arg("by_row"),
           py::arg("penalty_weight"), py::arg("offset"));
  module.def("regularised_adamw", &bind_regularised_adamw, py::arg("tensors"), py::arg("seed"),
             py::arg("stochastic"), py::arg("threads"));
  module.def("residual_diff_norm", &bind_residual_diff_norm, py::arg("x_in"), py::arg("x_out"), py::arg("norms"),
             py::arg("kind"), py::arg("threads"));
  module.def("residual_diff_norm_gradient", &bind_residual_diff_norm_gradient, py::arg("x_in"), py::arg("x_out"),
             py::arg("norms"), py::arg("scale"), py::arg("kind"), py::arg("grad_in"), py::arg("grad_out"),
             py::arg("threads"));
  module.def("layer_norm_virtual", &bind_layer_norm_virtual, py::arg("x"), py::arg("weight"), py::arg("bias"),
             py::arg("eps"), py::arg("norm_size"), py::arg("out"), py::arg("mean"), py::arg("rstd"),
             py::arg("threads"));
  module.def("layer_norm_virtual_gradient", &bind_layer_norm_virtual_gradient, py::arg("grad"), py::arg("x"),
             py::arg("weight"), py::arg("norm_size"), py::arg("mean"), py::arg("rstd"), py::arg("grad_x"),
             py::arg("grad_weight"), py::arg("grad_bias"), py::arg("threads"));
  module.def("slice_gather", &bind_slice_gather, py::arg("w"), py::arg("out"), py::arg("rows"), py::arg("columns"),
             py::arg("scale"), py::arg("offset"), py::arg("threads"));
}
