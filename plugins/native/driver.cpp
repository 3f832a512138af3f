#include "driver.h"

#include <dlfcn.h>

#include <algorithm>
#include <map>

namespace lacache {
namespace {

constexpr int kMaxDynamicShared = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr int kMajor = 75;            // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
constexpr int kMinor = 76;            // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
constexpr unsigned kDefaultShared = 48 * 1024;

// The functions of libcuda.so.1 that are used. Handles are opaque pointers.
struct Driver {
  int (*getErrorName)(int, char const**) = nullptr;
  int (*ctxGetCurrent)(void**) = nullptr;
  int (*ctxGetId)(void*, unsigned long long*) = nullptr;
  int (*ctxGetDevice)(int*) = nullptr;
  int (*deviceGetAttribute)(int*, int, int) = nullptr;
  int (*libraryLoadData)(void**, void const*, void*, void*, unsigned, void*, void*,
                         unsigned) = nullptr;
  int (*libraryUnload)(void*) = nullptr;
  int (*libraryGetKernel)(void**, void*, char const*) = nullptr;
  int (*kernelGetFunction)(void**, void*) = nullptr;
  int (*kernelSetAttribute)(int, int, void*, int) = nullptr;
  int (*launchKernel)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                      void*, void**, void**) = nullptr;

  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      throw Failure("no NVIDIA driver: libcuda.so.1 cannot be opened");
    }
    find(library, "cuGetErrorName", getErrorName);
    find(library, "cuCtxGetCurrent", ctxGetCurrent);
    find(library, "cuCtxGetId", ctxGetId);
    find(library, "cuCtxGetDevice", ctxGetDevice);
    find(library, "cuDeviceGetAttribute", deviceGetAttribute);
    find(library, "cuLibraryLoadData", libraryLoadData);
    find(library, "cuLibraryUnload", libraryUnload);
    find(library, "cuLibraryGetKernel", libraryGetKernel);
    find(library, "cuKernelGetFunction", kernelGetFunction);
    find(library, "cuKernelSetAttribute", kernelSetAttribute);
    find(library, "cuLaunchKernel", launchKernel);
  }

  void check(int result, std::string const& what) const {
    if (result != 0) {
      char const* name = nullptr;
      getErrorName(result, &name);
      throw Failure(what + ": " + (name != nullptr ? name : std::to_string(result)));
    }
  }

 private:
  template <class Function>
  static void find(void* library, char const* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (function == nullptr) {
      throw Failure(std::string("the NVIDIA driver is older than CUDA 12: it has no ") + name);
    }
  }
};

Driver const& driver() {
  static Driver const instance;
  return instance;
}

// Cubins in the driver, which are unloaded again unless all of a program could be loaded.
class Libraries {
 public:
  explicit Libraries(size_t count) { loaded_.reserve(count); }
  Libraries(Libraries const&) = delete;
  Libraries& operator=(Libraries const&) = delete;
  ~Libraries() {
    for (void* library : loaded_) {
      driver().libraryUnload(library);
    }
  }

  void* load(std::string const& image, std::string const& what) {
    void* library = nullptr;
    driver().check(driver().libraryLoadData(&library, image.c_str(), nullptr, nullptr, 0, nullptr,
                                            nullptr, 0),
                   what);
    loaded_.push_back(library);
    return library;
  }

  void keep() { loaded_.clear(); }

 private:
  std::vector<void*> loaded_;
};

// An address may come back after its context was destroyed, an identifier does not.
unsigned long long currentContext() {
  void* context = nullptr;
  unsigned long long identifier = 0;
  driver().check(driver().ctxGetCurrent(&context), "cuCtxGetCurrent");
  if (context == nullptr) {
    throw Failure("no CUDA context is current in this thread");
  }
  driver().check(driver().ctxGetId(context, &identifier), "cuCtxGetId");
  return identifier;
}

}  // namespace

std::shared_ptr<LoadedProgram> LoadedProgram::intern(void const* data, size_t size) {
  // Never destroyed, so that no destructor runs after the driver's.
  static auto& mutex = *new std::mutex;
  static auto& programs = *new std::map<std::string, std::shared_ptr<LoadedProgram>>;
  Program parsed = Program::parse(data, size);
  std::lock_guard<std::mutex> lock(mutex);
  auto& entry = programs[parsed.blob];
  if (entry == nullptr) {
    entry = std::make_shared<LoadedProgram>(std::move(parsed));
  }
  return entry;
}

void LoadedProgram::load(int device) {
  Driver const& cuda = driver();
  int major = 0;
  int minor = 0;
  cuda.check(cuda.deviceGetAttribute(&major, kMajor, device), "cuDeviceGetAttribute");
  cuda.check(cuda.deviceGetAttribute(&minor, kMinor, device), "cuDeviceGetAttribute");
  if (10 * major + minor != program.sm) {
    throw Failure(program.op + " was built for sm_" + std::to_string(program.sm) +
                  ", this GPU is sm_" + std::to_string(10 * major + minor) +
                  "; rebuild the engine for it: lacache-trt build BUNDLE OUT --force");
  }
  if (kernels_.empty()) {
    std::vector<void*> kernels;
    Libraries libraries(program.kernels.size());
    for (Kernel const& kernel : program.kernels) {
      void* handle = nullptr;
      void* library =
          libraries.load(kernel.image, program.op + ": cuLibraryLoadData of " + kernel.name);
      cuda.check(cuda.libraryGetKernel(&handle, library, kernel.name.c_str()),
                 program.op + ": cuLibraryGetKernel of " + kernel.name);
      kernels.push_back(handle);
    }
    kernels_ = std::move(kernels);
    libraries.keep();
  }
  for (size_t i = 0; i < kernels_.size(); ++i) {
    Kernel const& kernel = program.kernels[i];
    void* function = nullptr;
    cuda.check(cuda.kernelGetFunction(&function, kernels_[i]),
               program.op + ": loading " + kernel.name);
    if (kernel.shared > kDefaultShared) {
      cuda.check(cuda.kernelSetAttribute(kMaxDynamicShared, static_cast<int>(kernel.shared),
                                         kernels_[i], device),
                 program.op + ": " + std::to_string(kernel.shared) + " bytes of shared memory");
    }
  }
}

void LoadedProgram::prepare() {
  unsigned long long const context = currentContext();
  std::lock_guard<std::mutex> lock(mutex_);
  if (std::find(contexts_.begin(), contexts_.end(), context) != contexts_.end()) {
    return;
  }
  int device = 0;
  driver().check(driver().ctxGetDevice(&device), "cuCtxGetDevice");
  load(device);
  contexts_.push_back(context);
}

void LoadedProgram::enqueue(std::vector<Shape> const& inputs, Pointers const& pointers,
                            void* stream) {
  prepare();
  auto const bound = [&](Argument kind, size_t index) -> void const* {
    switch (kind) {
      case Argument::kInput:
        return pointers.inputs[index];
      case Argument::kOutput:
        return pointers.outputs[index];
      case Argument::kWorkspace:
        return pointers.workspace;
      default:
        return nullptr;
    }
  };
  for (ResolvedLaunch& step : resolve(program, inputs)) {
    std::vector<ArgumentRule> const& rules =
        program.launches[static_cast<size_t>(step.launch)].arguments;
    void const* addresses[kMaxArguments] = {};
    void* parameters[kMaxArguments] = {};
    for (size_t i = 0; i < rules.size(); ++i) {
      addresses[i] = bound(rules[i].kind, static_cast<size_t>(rules[i].index));
      if (rules[i].kind == Argument::kWorkspace && addresses[i] == nullptr) {
        throw Failure(program.op + ": no workspace was given");
      }
      bool const scalar = rules[i].kind == Argument::kScalar;
      parameters[i] =
          scalar ? static_cast<void*>(&step.scalars[i]) : static_cast<void*>(&addresses[i]);
    }
    auto const at = static_cast<size_t>(step.kernel);
    Kernel const& kernel = program.kernels[at];
    driver().check(
        driver().launchKernel(kernels_[at], step.grid[0], step.grid[1], step.grid[2],
                              kernel.threads, 1, 1, kernel.shared, stream, parameters, nullptr),
        program.op + ": launching " + kernel.name);
  }
}

}  // namespace lacache
