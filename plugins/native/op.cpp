#include "op.h"

#include <cstring>
#include <type_traits>

namespace lacache {
namespace {

// int32_t in TensorRT 8.5, int64_t since 10.
using Size = std::remove_all_extents_t<decltype(nvinfer1::Dims::d)>;

struct SymbolicDimensions {
  using Value = nvinfer1::IDimensionExpr const*;
  nvinfer1::DimsExprs const* inputs;
  nvinfer1::IExprBuilder& builder;

  Value constant(int64_t value) { return checked(builder.constant(static_cast<Size>(value))); }
  Value dimension(int input, int axis) { return checked(inputs[input].d[axis]); }
  Value apply(Op op, Value a, Value b) {
    return checked(builder.operation(static_cast<nvinfer1::DimensionOperation>(op), *a, *b));
  }

  static Value checked(Value value) {
    if (value == nullptr) {
      throw Failure("TensorRT rejected a shape expression");
    }
    return value;
  }
};

}  // namespace

std::shared_ptr<LoadedProgram> programFromBytes(std::string const& op, void const* data,
                                                size_t size) {
  auto loaded = LoadedProgram::intern(data, size);
  if (loaded->program.op != op) {
    throw Failure("the node is " + op + " but its program is " + loaded->program.op);
  }
  return loaded;
}

std::shared_ptr<LoadedProgram> programFromFields(std::string const& op,
                                                 nvinfer1::PluginFieldCollection const* fields) {
  for (int32_t i = 0; fields != nullptr && i < fields->nbFields; ++i) {
    nvinfer1::PluginField const& field = fields->fields[i];
    if (std::strcmp(field.name, kField) == 0 && field.type == nvinfer1::PluginFieldType::kINT8 &&
        field.length > 0) {
      return programFromBytes(op, field.data, static_cast<size_t>(field.length));
    }
  }
  throw Failure("the " + op +
                " node carries no program for a GPU; build the engine with: "
                "lacache-trt build BUNDLE OUT");
}

Shape toShape(nvinfer1::Dims const& dims) {
  Shape shape;
  if (dims.nbDims < 0 || dims.nbDims > kMaxRank) {
    throw Failure("a tensor has " + std::to_string(dims.nbDims) + " dimensions");
  }
  shape.rank = dims.nbDims;
  for (int axis = 0; axis < shape.rank; ++axis) {
    shape.dims[axis] = dims.d[axis];
  }
  return shape;
}

std::vector<Shape> toShapes(nvinfer1::PluginTensorDesc const* inputs, int32_t count) {
  std::vector<Shape> shapes;
  for (int32_t i = 0; i < count; ++i) {
    shapes.push_back(toShape(inputs[i].dims));
  }
  return shapes;
}

bool supports(Program const& program, int32_t position, nvinfer1::PluginTensorDesc const& desc) {
  auto const inputs = static_cast<int32_t>(program.inputs.size());
  auto const outputs = static_cast<int32_t>(program.outputs.size());
  if (position < 0 || position >= inputs + outputs) {
    return false;
  }
  TensorRule const& rule = position < inputs
                               ? program.inputs[static_cast<size_t>(position)]
                               : program.outputs[static_cast<size_t>(position - inputs)];
  return desc.format == nvinfer1::TensorFormat::kLINEAR &&
         static_cast<int64_t>(desc.type) == rule.dtype;
}

nvinfer1::DimsExprs outputShape(Program const& program, int32_t index,
                                nvinfer1::DimsExprs const* inputs, int32_t count,
                                nvinfer1::IExprBuilder& builder) {
  bool good = index >= 0 && index < static_cast<int32_t>(program.outputs.size()) &&
              count == static_cast<int32_t>(program.inputs.size());
  for (int32_t i = 0; good && i < count; ++i) {
    good = inputs[i].nbDims == program.inputs[static_cast<size_t>(i)].rank;
  }
  if (!good) {
    throw Failure(program.op + ": the node's inputs are not those that its program declares");
  }
  TensorRule const& rule = program.outputs[static_cast<size_t>(index)];
  SymbolicDimensions dimensions{inputs, builder};
  nvinfer1::DimsExprs shape{};
  shape.nbDims = rule.rank;
  for (int axis = 0; axis < rule.rank; ++axis) {
    shape.d[axis] = evaluate<SymbolicDimensions>(rule.shape[static_cast<size_t>(axis)], dimensions);
  }
  return shape;
}

size_t workspaceSize(Program const& program, std::vector<Shape> const& largest) {
  checkShapes(program, largest);
  int64_t const bytes = evaluate(program.workspace, largest);
  if (bytes < 0) {
    throw Failure(program.op + ": the workspace has a negative size");
  }
  return static_cast<size_t>(bytes);
}

}  // namespace lacache
