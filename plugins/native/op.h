// What the faces of a cubin op share: rules in TensorRT's terms, and the border where failures
// become log messages.
#pragma once

#include <NvInferRuntime.h>

#include <memory>
#include <string>

#include "driver.h"

namespace lacache {

constexpr char kNamespace[] = "lacache";
constexpr char kVersion[] = "1";
constexpr char kField[] = "program";  // the one field: an INT8 array, see format.h

// Every op is registered under its own name; what it does is data.
constexpr char const* kOps[] = {"AttentionFill", "AttentionReuse", "Attention",
                                "AttentionWindow", "RMSNormQuant", "SwiGLUQuant",
                                "GroupQuant", "GroupLinear", "SampleBlock"};

// Sends a message to TensorRT's logger, or to stderr if there is none.
void logError(std::string const& message);

// Runs `body`; a failure is logged and gives false. Nothing is thrown into TensorRT.
template <class Body>
bool guarded(Body&& body) noexcept {
  try {
    body();
    return true;
  } catch (std::exception const& failure) {
    logError(std::string("lacache: ") + failure.what());
  } catch (...) {
    logError("lacache: unknown failure");
  }
  return false;
}

// The program in a creator's fields. Throws Failure if it is missing, damaged or another op's.
std::shared_ptr<LoadedProgram> programFromFields(std::string const& op,
                                                 nvinfer1::PluginFieldCollection const* fields);
std::shared_ptr<LoadedProgram> programFromBytes(std::string const& op, void const* data,
                                                size_t size);

Shape toShape(nvinfer1::Dims const& dims);
std::vector<Shape> toShapes(nvinfer1::PluginTensorDesc const* inputs, int32_t count);

// Whether tensor `position` (inputs, then outputs) may have this type and format.
bool supports(Program const& program, int32_t position, nvinfer1::PluginTensorDesc const& desc);

// The symbolic shape of output `index`.
nvinfer1::DimsExprs outputShape(Program const& program, int32_t index,
                                nvinfer1::DimsExprs const* inputs, int32_t count,
                                nvinfer1::IExprBuilder& builder);

// Bytes of workspace for the largest input shapes.
size_t workspaceSize(Program const& program, std::vector<Shape> const& largest);

}  // namespace lacache
