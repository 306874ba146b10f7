// Private tables of cuGetExportTable, as far as it is known which handles go through them: a
// program that uses no more than these slots finds what the real driver has there. Written from
// the arguments that were seen at the slots; what their owner does with a destructor was not.
#include <functional>
#include <initializer_list>

#include "client.h"

namespace flowgpu::emu {

namespace {

uint64_t id(CUcontext context) {
    return reinterpret_cast<uint64_t>(context);
}

// The context that null means, alive.
CUresult resolve(uint64_t* context) {
    if (*context == 0) {
        *context = thread_state().current();
    }
    return *context == 0 ? CUDA_ERROR_INVALID_CONTEXT : rpc(Op::CtxCheck, outs(), *context);
}

CUresult storage_put(CUcontext context, void* key, void* value, void*) {
    Entry entry;
    uint64_t owner = id(context);
    if (const CUresult r = resolve(&owner); r != CUDA_SUCCESS) {
        return r;
    }
    Process& p = process();
    std::lock_guard<std::mutex> lock(p.mutex);
    // Measured: what is there stays.
    return p.storage.try_emplace({owner, key}, value).second ? CUDA_SUCCESS
                                                             : CUDA_ERROR_INVALID_HANDLE;
}

CUresult storage_delete(CUcontext context, void* key) {
    Entry entry;
    uint64_t owner = id(context);
    if (const CUresult r = resolve(&owner); r != CUDA_SUCCESS) {
        return r;
    }
    Process& p = process();
    std::lock_guard<std::mutex> lock(p.mutex);
    return p.storage.erase({owner, key}) != 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult storage_get(void** value, CUcontext context, void* key) {
    Entry entry;
    uint64_t owner = id(context);
    if (value == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (const CUresult r = resolve(&owner); r != CUDA_SUCCESS) {
        return r;
    }
    Process& p = process();
    std::lock_guard<std::mutex> lock(p.mutex);
    const auto found = p.storage.find({owner, key});
    if (found == p.storage.end()) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    *value = found->second;
    return CUDA_SUCCESS;
}

// Without making it, which is for cuDevicePrimaryCtxRetain.
CUresult primary_context(CUcontext* context, CUdevice device) {
    return context == nullptr ? CUDA_ERROR_INVALID_VALUE
                              : rpc(Op::PrimaryHandle, outs(context), device);
}

using Visit = void (*)(void* argument, CUfunction function);

// 1, or 0 when it cannot. What a visit answers was not seen to matter.
uint64_t each_function(CUcontext, CUmodule module, Visit visit, void* argument) {
    unsigned count = 0;
    if (cuModuleGetFunctionCount(&count, module) != CUDA_SUCCESS) {
        return 0;
    }
    std::vector<CUfunction> functions(count);
    if (count != 0 && cuModuleEnumerateFunctions(functions.data(), count, module) != CUDA_SUCCESS) {
        return 0;
    }
    for (CUfunction function : functions) {
        visit(argument, function);
    }
    return 1;
}

// What the real driver does with the context is not known. Here it must live.
CUresult use_context(CUcontext context) {
    Entry entry;
    uint64_t owner = id(context);
    return resolve(&owner);
}

// A slot of this driver's own, for what is done about slots that nobody knows: takes handles in all
// registers of arguments but one, and more behind them.
CUresult use_handles(double* sum, CUcontext context, CUstream stream, CUevent event,
                     CUfunction function, CUmodule module, int seventh, double in_vector_register) {
    int priority = 0;
    unsigned count = 0;
    const char* name = nullptr;
    uint64_t owner = id(context);
    CUresult result = resolve(&owner);
    for (const auto& use : std::initializer_list<std::function<CUresult()>>{
             [&] { return cuStreamGetPriority(stream, &priority); },
             [&] { return cuEventQuery(event); },
             [&] { return cuFuncGetName(&name, function); },
             [&] { return cuModuleGetFunctionCount(&count, module); },
         }) {
        if (result == CUDA_SUCCESS) {
            result = use();
        }
    }
    *sum = count + seventh + in_vector_register;
    return result;
}

// Another one of its own, for what is known of the current context when a slot sets one.
CUresult set_context(CUcontext context) {
    return cuCtxSetCurrent(context);
}

CUresult no_such_slot() {
    return unsupported("a slot of a private table");
}

template <class F> void* slot(F function) {
    return reinterpret_cast<void*>(function);
}

struct Table {
    unsigned char uuid[16];
    void** slots;
};

// Writable: whoever intercepts must patch slots in place, since the tables' own addresses count.
void* storage_slots[] = {slot(storage_put), slot(storage_delete), slot(storage_get)};
void* primary_slots[] = {nullptr /* its size in bytes */, slot(no_such_slot),
                         slot(primary_context)};
void* module_slots[] = {nullptr,
                        slot(no_such_slot),
                        slot(no_such_slot),
                        slot(no_such_slot),
                        slot(no_such_slot),
                        slot(no_such_slot),
                        slot(no_such_slot),
                        slot(each_function)};

void* second_context_slots[] = {nullptr, slot(no_such_slot), slot(use_context)};
void* fourth_context_slots[] = {nullptr, slot(no_such_slot), slot(no_such_slot), slot(no_such_slot),
                                slot(use_context)};

void* handle_slots[] = {nullptr, slot(use_handles), slot(set_context)};

const Table kTables[] = {
    {{0xc6, 0x93, 0x33, 0x6e, 0x11, 0x21, 0xdf, 0x11, 0xa8, 0xc3, 0x68, 0xf3, 0x55, 0xd8, 0x95,
      0x93},
     storage_slots},
    {{0x6b, 0xd5, 0xfb, 0x6c, 0x5b, 0xf4, 0xe7, 0x4a, 0x89, 0x87, 0xd9, 0x39, 0x12, 0xfd, 0x9d,
      0xf9},
     primary_slots},
    {{0x6e, 0x16, 0x3f, 0xbe, 0xb9, 0x58, 0x44, 0x4d, 0x83, 0x5c, 0xe1, 0x82, 0xaf, 0xf1, 0x99,
      0x1e},
     module_slots},
    {{0x26, 0x3e, 0x88, 0x60, 0x7c, 0xd2, 0x61, 0x43, 0x92, 0xf6, 0xbb, 0xd5, 0x00, 0x6d, 0xfa,
      0x7e},
     second_context_slots},
    {{0x21, 0x31, 0x8c, 0x60, 0x97, 0x14, 0x32, 0x48, 0x8c, 0xa6, 0x41, 0xff, 0x73, 0x24, 0xc8,
      0xf2},
     fourth_context_slots},
    {{'a', 'n', ' ', 'e', 'm', 'u', 'l', 'a', 't', 'e', 'd', ' ', 's', 'l', 'o', 't'},
     handle_slots},
};

} // namespace

} // namespace flowgpu::emu

using namespace flowgpu::emu;

extern "C" {

CUresult CUDAAPI cuGetExportTable(const void** table, const CUuuid* uuid) {
    if (table == nullptr || uuid == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    primary_slots[0] = reinterpret_cast<void*>(sizeof primary_slots);
    module_slots[0] = reinterpret_cast<void*>(sizeof module_slots);
    second_context_slots[0] = reinterpret_cast<void*>(sizeof second_context_slots);
    fourth_context_slots[0] = reinterpret_cast<void*>(sizeof fourth_context_slots);
    handle_slots[0] = reinterpret_cast<void*>(sizeof handle_slots);
    for (const Table& known : kTables) {
        if (std::memcmp(uuid->bytes, known.uuid, sizeof known.uuid) == 0) {
            *table = known.slots;
            return CUDA_SUCCESS;
        }
    }
    *table = nullptr;
    return CUDA_ERROR_INVALID_VALUE;
}

} // extern "C"
