// Makes a plugin from a field, as the parser does, and another one from what it serialises, as an
// opened plan does; says whether all carry the same bytes. Compiled and run by test_plugin_fields.
// Arguments: the plugin library, the op, a file with the op's program.
#include <NvInferRuntime.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::TensorRTPhase;

static PluginFieldCollection const* serialised(nvinfer1::IPluginV3* plugin) {
  auto* runtime = static_cast<nvinfer1::IPluginV3OneRuntime*>(
      plugin->getCapabilityInterface(nvinfer1::PluginCapabilityType::kRUNTIME));
  return runtime->getFieldsToSerialize();
}

static bool holds(nvinfer1::IPluginV3* plugin, std::string const& program) {
  if (plugin == nullptr) return false;
  for (int call = 0; call < 3; ++call) {  // TensorRT asks several times
    PluginFieldCollection const* fields = serialised(plugin);
    if (fields == nullptr || fields->nbFields != 1) return false;
    PluginField const& field = fields->fields[0];
    if (std::strcmp(field.name, "program") != 0) return false;
    if (field.type != nvinfer1::PluginFieldType::kINT8) return false;
    if (field.length != static_cast<int32_t>(program.size())) return false;
    if (std::memcmp(field.data, program.data(), program.size()) != 0) return false;
  }
  return true;
}

int main(int, char** arguments) {
  void* library = dlopen(arguments[1], RTLD_NOW);
  if (library == nullptr) return std::printf("%s\n", dlerror()), 1;
  using GetCreators = nvinfer1::IPluginCreatorInterface* const* (*)(int32_t&);
  auto getCreators = reinterpret_cast<GetCreators>(dlsym(library, "getCreators"));
  std::ifstream file(arguments[3], std::ios::binary);
  std::string const program{std::istreambuf_iterator<char>(file), {}};

  int32_t count = 0;
  nvinfer1::IPluginCreatorInterface* const* creators = getCreators(count);
  for (int32_t i = 0; i < count; ++i) {
    auto* creator = static_cast<nvinfer1::IPluginCreatorV3One*>(creators[i]);
    if (std::strcmp(creator->getPluginName(), arguments[2]) != 0) continue;
    std::vector<char> bytes(program.begin(), program.end());
    PluginField field{"program", bytes.data(), nvinfer1::PluginFieldType::kINT8,
                      static_cast<int32_t>(bytes.size())};
    PluginFieldCollection fields{1, &field};
    auto* first = creator->createPlugin("node", &fields, TensorRTPhase::kBUILD);
    std::memset(bytes.data(), 0, bytes.size());  // the field is the caller's, and may go
    if (!holds(first, program)) return std::puts("the first plugin differs"), 1;
    auto* second = creator->createPlugin("node", serialised(first), TensorRTPhase::kRUNTIME);
    if (!holds(second, program)) return std::puts("the second plugin differs"), 1;
    auto* copy = second->clone();
    delete first;
    delete second;
    if (!holds(copy, program)) return std::puts("the clone differs"), 1;
    delete copy;
    if (creator->createPlugin("node", &fields, TensorRTPhase::kRUNTIME) != nullptr) {
      return std::puts("zeros became a plugin"), 1;
    }
    return std::puts("equal"), 0;
  }
  return std::puts("no creator"), 1;
}
