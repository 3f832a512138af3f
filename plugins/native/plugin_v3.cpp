// The IPluginV3 face: TensorRT 10, 11 and TensorRT-RTX.
#include "op.h"

#if NV_TENSORRT_MAJOR != 8

#include <atomic>
#include <cstdio>

namespace lacache {
namespace {

std::atomic<nvinfer1::ILoggerFinder*> loggerFinder{nullptr};

class CubinPlugin final : public nvinfer1::IPluginV3,
                          public nvinfer1::IPluginV3OneCore,
                          public nvinfer1::IPluginV3OneBuild,
                          public nvinfer1::IPluginV3OneRuntime {
 public:
  explicit CubinPlugin(std::shared_ptr<LoadedProgram> loaded) : loaded_(std::move(loaded)) {
    Program const& program = loaded_->program;
    field_ = {kField, program.blob.data(), nvinfer1::PluginFieldType::kINT8,
              static_cast<int32_t>(program.blob.size())};
    fields_ = {1, &field_};
  }

  // Core
  nvinfer1::IPluginCapability* getCapabilityInterface(
      nvinfer1::PluginCapabilityType type) noexcept override {
    switch (type) {
      case nvinfer1::PluginCapabilityType::kCORE:
        return static_cast<nvinfer1::IPluginV3OneCore*>(this);
      case nvinfer1::PluginCapabilityType::kBUILD:
        return static_cast<nvinfer1::IPluginV3OneBuild*>(this);
      case nvinfer1::PluginCapabilityType::kRUNTIME:
        return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
    }
    return nullptr;
  }
  nvinfer1::IPluginV3* clone() noexcept override {
    nvinfer1::IPluginV3* copy = nullptr;
    guarded([&] { copy = new CubinPlugin(loaded_); });
    return copy;
  }
  char const* getPluginName() const noexcept override { return loaded_->program.op.c_str(); }
  char const* getPluginVersion() const noexcept override { return kVersion; }
  char const* getPluginNamespace() const noexcept override { return kNamespace; }

  // Build
  int32_t getNbOutputs() const noexcept override {
    return static_cast<int32_t>(loaded_->program.outputs.size());
  }
  int32_t configurePlugin(nvinfer1::DynamicPluginTensorDesc const*, int32_t,
                          nvinfer1::DynamicPluginTensorDesc const*, int32_t) noexcept override {
    return 0;
  }
  bool supportsFormatCombination(int32_t position, nvinfer1::DynamicPluginTensorDesc const* tensors,
                                 int32_t, int32_t) noexcept override {
    return supports(loaded_->program, position, tensors[position].desc);
  }
  int32_t getOutputDataTypes(nvinfer1::DataType* types, int32_t count, nvinfer1::DataType const*,
                             int32_t) const noexcept override {
    if (count != getNbOutputs()) {
      return -1;
    }
    for (int32_t i = 0; i < count; ++i) {
      types[i] =
          static_cast<nvinfer1::DataType>(loaded_->program.outputs[static_cast<size_t>(i)].dtype);
    }
    return 0;
  }
  int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t inputCount,
                          nvinfer1::DimsExprs const*, int32_t, nvinfer1::DimsExprs* outputs,
                          int32_t outputCount, nvinfer1::IExprBuilder& builder) noexcept override {
    return status(guarded([&] {
      for (int32_t i = 0; i < outputCount; ++i) {
        outputs[i] = outputShape(loaded_->program, i, inputs, inputCount, builder);
      }
    }));
  }
  size_t getWorkspaceSize(nvinfer1::DynamicPluginTensorDesc const* inputs, int32_t inputCount,
                          nvinfer1::DynamicPluginTensorDesc const*,
                          int32_t) const noexcept override {
    size_t bytes = 0;
    guarded([&] {
      std::vector<Shape> largest;
      for (int32_t i = 0; i < inputCount; ++i) {
        largest.push_back(toShape(inputs[i].max));
      }
      bytes = workspaceSize(loaded_->program, largest);
    });
    return bytes;
  }

  // Runtime
  int32_t onShapeChange(nvinfer1::PluginTensorDesc const* inputs, int32_t inputCount,
                        nvinfer1::PluginTensorDesc const*, int32_t) noexcept override {
    return status(guarded([&] {
      loaded_->prepare();
      resolve(loaded_->program, toShapes(inputs, inputCount));
    }));
  }
  int32_t enqueue(nvinfer1::PluginTensorDesc const* descs, nvinfer1::PluginTensorDesc const*,
                  void const* const* inputs, void* const* outputs, void* workspace,
                  cudaStream_t stream) noexcept override {
    return status(guarded([&] {
      auto const count = static_cast<int32_t>(loaded_->program.inputs.size());
      loaded_->enqueue(toShapes(descs, count), {inputs, outputs, workspace}, stream);
    }));
  }
  nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext*) noexcept override {
    nvinfer1::IPluginV3* copy = nullptr;
    guarded([&] {
      loaded_->prepare();
      copy = new CubinPlugin(loaded_);
    });
    return copy;
  }
  nvinfer1::PluginFieldCollection const* getFieldsToSerialize() noexcept override {
    return &fields_;
  }

 private:
  static int32_t status(bool good) { return good ? 0 : -1; }

  std::shared_ptr<LoadedProgram> loaded_;
  nvinfer1::PluginField field_;
  nvinfer1::PluginFieldCollection fields_;
};

class CubinCreator final : public nvinfer1::IPluginCreatorV3One {
 public:
  explicit CubinCreator(char const* op) : op_(op) {}

  nvinfer1::IPluginV3* createPlugin(char const*, nvinfer1::PluginFieldCollection const* fields,
                                    nvinfer1::TensorRTPhase) noexcept override {
    nvinfer1::IPluginV3* plugin = nullptr;
    guarded([&] { plugin = new CubinPlugin(programFromFields(op_, fields)); });
    return plugin;
  }
  nvinfer1::PluginFieldCollection const* getFieldNames() noexcept override { return &fields_; }
  char const* getPluginName() const noexcept override { return op_; }
  char const* getPluginVersion() const noexcept override { return kVersion; }
  char const* getPluginNamespace() const noexcept override { return kNamespace; }

 private:
  char const* op_;
  nvinfer1::PluginField field_{kField, nullptr, nvinfer1::PluginFieldType::kINT8, 1};
  nvinfer1::PluginFieldCollection fields_{1, &field_};
};

}  // namespace

void logError(std::string const& message) {
  nvinfer1::ILoggerFinder* finder = loggerFinder.load();
  nvinfer1::ILogger* logger = finder != nullptr ? finder->findLogger() : nullptr;
  if (logger != nullptr) {
    logger->log(nvinfer1::ILogger::Severity::kERROR, message.c_str());
  } else {
    std::fprintf(stderr, "%s\n", message.c_str());
  }
}

}  // namespace lacache

// What IPluginRegistry::loadLibrary looks up.
extern "C" __attribute__((visibility("default"))) nvinfer1::IPluginCreatorInterface* const*
getCreators(int32_t& count) {
  using Creators = std::vector<nvinfer1::IPluginCreatorInterface*>;
  static Creators const& creators = *[] {
    auto* made = new Creators;
    for (char const* op : lacache::kOps) {
      made->push_back(new lacache::CubinCreator(op));
    }
    return made;
  }();
  count = static_cast<int32_t>(creators.size());
  return creators.data();
}

extern "C" __attribute__((visibility("default"))) void setLoggerFinder(
    nvinfer1::ILoggerFinder* finder) {
  lacache::loggerFinder.store(finder);
}

#endif
