// The IPluginV2DynamicExt face: TensorRT 8.5, which has no IPluginV3 and loads no plugin libraries.
// Opening the library registers its ops if TensorRT is in the process.
#include "op.h"

#if NV_TENSORRT_MAJOR == 8

#include <dlfcn.h>

#include <cstdio>
#include <cstring>

namespace lacache {
namespace {

// A function of the TensorRT in this process, or null: the library is not linked with it.
template <class Function>
Function fromTensorRT(char const* name) {
  void* symbol = dlsym(RTLD_DEFAULT, name);
  if (symbol == nullptr) {
    void* library = dlopen("libnvinfer.so.8", RTLD_LAZY | RTLD_NOLOAD);
    symbol = library != nullptr ? dlsym(library, name) : nullptr;
  }
  return reinterpret_cast<Function>(symbol);
}

class CubinPlugin final : public nvinfer1::IPluginV2DynamicExt {
 public:
  explicit CubinPlugin(std::shared_ptr<LoadedProgram> loaded) : loaded_(std::move(loaded)) {}

  char const* getPluginType() const noexcept override { return loaded_->program.op.c_str(); }
  char const* getPluginVersion() const noexcept override { return kVersion; }
  void setPluginNamespace(char const*) noexcept override {}
  char const* getPluginNamespace() const noexcept override { return kNamespace; }
  int32_t getNbOutputs() const noexcept override {
    return static_cast<int32_t>(loaded_->program.outputs.size());
  }
  nvinfer1::DataType getOutputDataType(int32_t index, nvinfer1::DataType const*,
                                       int32_t) const noexcept override {
    return static_cast<nvinfer1::DataType>(
        loaded_->program.outputs[static_cast<size_t>(index)].dtype);
  }
  nvinfer1::DimsExprs getOutputDimensions(int32_t index, nvinfer1::DimsExprs const* inputs,
                                          int32_t count,
                                          nvinfer1::IExprBuilder& builder) noexcept override {
    nvinfer1::DimsExprs shape{};
    shape.nbDims = -1;
    guarded([&] { shape = outputShape(loaded_->program, index, inputs, count, builder); });
    return shape;
  }
  bool supportsFormatCombination(int32_t position, nvinfer1::PluginTensorDesc const* tensors,
                                 int32_t, int32_t) noexcept override {
    return supports(loaded_->program, position, tensors[position]);
  }
  void configurePlugin(nvinfer1::DynamicPluginTensorDesc const*, int32_t,
                       nvinfer1::DynamicPluginTensorDesc const*, int32_t) noexcept override {}
  size_t getWorkspaceSize(nvinfer1::PluginTensorDesc const* inputs, int32_t count,
                          nvinfer1::PluginTensorDesc const*, int32_t) const noexcept override {
    size_t bytes = 0;
    guarded([&] { bytes = workspaceSize(loaded_->program, toShapes(inputs, count)); });
    return bytes;
  }
  int32_t initialize() noexcept override {
    return guarded([&] { loaded_->prepare(); }) ? 0 : -1;
  }
  void terminate() noexcept override {}
  int32_t enqueue(nvinfer1::PluginTensorDesc const* descs, nvinfer1::PluginTensorDesc const*,
                  void const* const* inputs, void* const* outputs, void* workspace,
                  cudaStream_t stream) noexcept override {
    return guarded([&] {
      auto const count = static_cast<int32_t>(loaded_->program.inputs.size());
      loaded_->enqueue(toShapes(descs, count), {inputs, outputs, workspace}, stream);
    })
               ? 0
               : -1;
  }
  size_t getSerializationSize() const noexcept override { return loaded_->program.blob.size(); }
  void serialize(void* buffer) const noexcept override {
    std::memcpy(buffer, loaded_->program.blob.data(), loaded_->program.blob.size());
  }
  nvinfer1::IPluginV2DynamicExt* clone() const noexcept override {
    nvinfer1::IPluginV2DynamicExt* copy = nullptr;
    guarded([&] { copy = new CubinPlugin(loaded_); });
    return copy;
  }
  void destroy() noexcept override { delete this; }

 private:
  std::shared_ptr<LoadedProgram> loaded_;
};

class CubinCreator final : public nvinfer1::IPluginCreator {
 public:
  explicit CubinCreator(char const* op) : op_(op) {}

  char const* getPluginName() const noexcept override { return op_; }
  char const* getPluginVersion() const noexcept override { return kVersion; }
  void setPluginNamespace(char const*) noexcept override {}
  char const* getPluginNamespace() const noexcept override { return kNamespace; }
  nvinfer1::PluginFieldCollection const* getFieldNames() noexcept override { return &fields_; }
  nvinfer1::IPluginV2* createPlugin(
      char const*, nvinfer1::PluginFieldCollection const* fields) noexcept override {
    nvinfer1::IPluginV2* plugin = nullptr;
    guarded([&] { plugin = new CubinPlugin(programFromFields(op_, fields)); });
    return plugin;
  }
  nvinfer1::IPluginV2* deserializePlugin(char const*, void const* data,
                                         size_t size) noexcept override {
    nvinfer1::IPluginV2* plugin = nullptr;
    guarded([&] { plugin = new CubinPlugin(programFromBytes(op_, data, size)); });
    return plugin;
  }

 private:
  char const* op_;
  nvinfer1::PluginField field_{kField, nullptr, nvinfer1::PluginFieldType::kINT8, 1};
  nvinfer1::PluginFieldCollection fields_{1, &field_};
};

}  // namespace

void logError(std::string const& message) {
  auto* getLogger = fromTensorRT<nvinfer1::ILogger* (*)()>("getLogger");
  nvinfer1::ILogger* logger = getLogger != nullptr ? getLogger() : nullptr;
  if (logger != nullptr) {
    logger->log(nvinfer1::ILogger::Severity::kERROR, message.c_str());
  } else {
    std::fprintf(stderr, "%s\n", message.c_str());
  }
}

}  // namespace lacache

// Registers the ops with the TensorRT in this process; returns how many there are, 0 without one.
extern "C" __attribute__((visibility("default"))) int32_t lacacheRegister() {
  static std::mutex mutex;
  static int32_t count = 0;
  std::lock_guard<std::mutex> lock(mutex);
  auto* getRegistry = lacache::fromTensorRT<nvinfer1::IPluginRegistry* (*)()>("getPluginRegistry");
  if (count == 0 && getRegistry != nullptr) {
    for (char const* op : lacache::kOps) {
      count += getRegistry()->registerCreator(*new lacache::CubinCreator(op), lacache::kNamespace);
    }
  }
  return count;
}

__attribute__((constructor)) static void registerWhenOpened() { lacacheRegister(); }

#endif
