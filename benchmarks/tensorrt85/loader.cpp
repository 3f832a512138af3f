// Loads a TensorRT 8.5 plan and the plugin library without Python and runs it once.
//
//     loader PLAN PLUGIN_LIBRARY FOLDER
//
// FOLDER holds NAME.bin for each input; each output's bytes are hashed (FNV-1a) and printed as
// "NAME BYTES HASH". TensorRT and the driver are opened at run time, as a service's plugins are.
#include <NvInferRuntime.h>
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

struct Logger final : nvinfer1::ILogger {
  void log(Severity severity, char const* text) noexcept override {
    if (severity <= Severity::kWARNING) {
      std::fprintf(stderr, "%s\n", text);
    }
  }
};

void* open(char const* path) {
  void* library = dlopen(path, RTLD_LAZY | RTLD_GLOBAL);
  if (library == nullptr) {
    throw std::runtime_error(dlerror());
  }
  return library;
}

template <class Function>
Function find(void* library, char const* name) {
  void* symbol = dlsym(library, name);
  if (symbol == nullptr) {
    throw std::runtime_error(std::string("missing ") + name);
  }
  return reinterpret_cast<Function>(symbol);
}

void check(int status, char const* what) {
  if (status != 0) {
    throw std::runtime_error(std::string(what) + " failed: " + std::to_string(status));
  }
}

std::vector<char> read(std::string const& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw std::runtime_error("cannot read " + path);
  }
  return {std::istreambuf_iterator<char>(file), {}};
}

using Address = unsigned long long;

// The functions of the driver that are used.
struct Driver {
  void* library = open("libcuda.so.1");
  int (*init)(unsigned) = find<int (*)(unsigned)>(library, "cuInit");
  int (*retain)(void**, int) = find<int (*)(void**, int)>(library, "cuDevicePrimaryCtxRetain");
  int (*setCurrent)(void*) = find<int (*)(void*)>(library, "cuCtxSetCurrent");
  int (*synchronize)() = find<int (*)()>(library, "cuCtxSynchronize");
  int (*allocate)(Address*, size_t) = find<int (*)(Address*, size_t)>(library, "cuMemAlloc_v2");
  int (*upload)(Address, void const*, size_t) =
      find<int (*)(Address, void const*, size_t)>(library, "cuMemcpyHtoD_v2");
  int (*download)(void*, Address, size_t) =
      find<int (*)(void*, Address, size_t)>(library, "cuMemcpyDtoH_v2");
};

size_t elementBytes(nvinfer1::DataType type) {
  switch (type) {
    case nvinfer1::DataType::kHALF:
      return 2;
    case nvinfer1::DataType::kINT8:
    case nvinfer1::DataType::kBOOL:
    case nvinfer1::DataType::kUINT8:
      return 1;
    default:
      return 4;
  }
}

uint64_t fnv1a(std::vector<char> const& data) {
  uint64_t hash = 0xcbf29ce484222325ull;
  for (char byte : data) {
    hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3ull;
  }
  return hash;
}

struct Output {
  std::string name;
  Address address;
  size_t bytes;
};

Output bind(Driver const& cuda, nvinfer1::ICudaEngine& engine, nvinfer1::IExecutionContext& context,
            char const* name, std::string const& folder) {
  nvinfer1::Dims const shape = engine.getTensorShape(name);
  size_t bytes = elementBytes(engine.getTensorDataType(name));
  for (int axis = 0; axis < shape.nbDims; ++axis) {
    bytes *= static_cast<size_t>(shape.d[axis]);
  }
  Output bound{name, 0, bytes};
  check(cuda.allocate(&bound.address, bytes > 0 ? bytes : 1), "cuMemAlloc");
  if (engine.getTensorIOMode(name) == nvinfer1::TensorIOMode::kINPUT) {
    std::vector<char> const data = read(folder + "/" + name + ".bin");
    if (data.size() != bytes) {
      throw std::runtime_error(std::string(name) + ".bin has another size than the input");
    }
    check(cuda.upload(bound.address, data.data(), bytes), "cuMemcpyHtoD");
  }
  if (!context.setTensorAddress(name, reinterpret_cast<void*>(bound.address))) {
    throw std::runtime_error(std::string("TensorRT refused the address of ") + name);
  }
  return bound;
}

void run(char const* planPath, char const* pluginPath, std::string const& folder) {
  Driver const cuda;
  void* context = nullptr;
  check(cuda.init(0), "cuInit");
  check(cuda.retain(&context, 0), "cuDevicePrimaryCtxRetain");
  check(cuda.setCurrent(context), "cuCtxSetCurrent");
  void* tensorrt = open("libnvinfer.so.8");
  void* plugins = open(pluginPath);
  if (find<int32_t (*)()>(plugins, "lacacheRegister")() <= 0) {
    throw std::runtime_error("the plugin library registered nothing");
  }
  Logger logger;
  auto* create = find<void* (*)(void*, int)>(tensorrt, "createInferRuntime_INTERNAL");
  std::unique_ptr<nvinfer1::IRuntime> runtime(
      static_cast<nvinfer1::IRuntime*>(create(&logger, NV_TENSORRT_VERSION)));
  std::vector<char> const plan = read(planPath);
  std::unique_ptr<nvinfer1::ICudaEngine> engine(
      runtime->deserializeCudaEngine(plan.data(), plan.size()));
  if (engine == nullptr) {
    throw std::runtime_error("TensorRT refused the plan");
  }
  std::unique_ptr<nvinfer1::IExecutionContext> execution(engine->createExecutionContext());
  std::vector<Output> outputs;
  for (int index = 0; index < engine->getNbIOTensors(); ++index) {
    char const* name = engine->getIOTensorName(index);
    Output const bound = bind(cuda, *engine, *execution, name, folder);
    if (engine->getTensorIOMode(name) == nvinfer1::TensorIOMode::kOUTPUT) {
      outputs.push_back(bound);
    }
  }
  if (!execution->enqueueV3(nullptr)) {
    throw std::runtime_error("enqueue failed");
  }
  check(cuda.synchronize(), "cuCtxSynchronize");
  for (Output const& output : outputs) {
    std::vector<char> data(output.bytes);
    check(cuda.download(data.data(), output.address, data.size()), "cuMemcpyDtoH");
    std::printf("%s %zu %016llx\n", output.name.c_str(), data.size(),
                static_cast<unsigned long long>(fnv1a(data)));
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 4) {
    std::fprintf(stderr, "usage: %s PLAN PLUGIN_LIBRARY FOLDER\n", arguments[0]);
    return 2;
  }
  try {
    run(arguments[1], arguments[2], arguments[3]);
    return 0;
  } catch (std::exception const& failure) {
    std::fprintf(stderr, "%s\n", failure.what());
    return 1;
  }
}
