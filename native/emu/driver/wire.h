// The protocol between the emulated driver library and the emulated device, both built from one
// tree: requests and replies are a fixed header and packed values, one reply for each request.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace flowgpu::emu {

constexpr uint32_t kWireMagic = 0x46475545; // "EUGF"
constexpr uint32_t kWireVersion = 7;
constexpr uint32_t kMaxMessage = 1u << 30;

// What the name of a device socket and of a device mapping contain: the mark by which a tool tells
// "this process holds the device", as it tells it from /dev/nvidia* for a real driver.
constexpr const char* kDeviceMark = "flowgpu-emu";
constexpr const char* kDeviceMemfdName = "flowgpu-emu-device";
constexpr const char* kManagedMemfdName = "flowgpu-emu-device:managed";
constexpr const char* kMemoryMemfdName = "flowgpu-emu-mem";

constexpr uint64_t kGranularity = 2ull << 20;
constexpr uint64_t kSmallAlignment = 512;

// Answers of the device that never reach the application.
constexpr int32_t kNeedAddresses = -1; // payload: bytes of address space that the client must give
constexpr uint64_t kForManaged = uint64_t{1} << 63; // in those bytes: by ManagedPiece

#define FLOWGPU_EMU_OPS(X)                                                                         \
    X(Hello)                                                                                       \
    X(Unsupported)                                                                                 \
    X(AddAddresses)                                                                                \
    X(DeviceCount)                                                                                 \
    X(DeviceName)                                                                                  \
    X(DeviceUuid)                                                                                  \
    X(DeviceTotalMem)                                                                              \
    X(DeviceAttribute)                                                                             \
    X(DeviceReaches)                                                                               \
    X(PrimaryHandle)                                                                               \
    X(PrimaryRetain)                                                                               \
    X(PrimaryRelease)                                                                              \
    X(PrimaryReset)                                                                                \
    X(PrimarySetFlags)                                                                             \
    X(PrimaryGetState)                                                                             \
    X(CtxCreate)                                                                                   \
    X(CtxDestroy)                                                                                  \
    X(CtxCheck)                                                                                    \
    X(CtxSynchronize)                                                                              \
    X(CtxGetDevice)                                                                                \
    X(CtxGetFlags)                                                                                 \
    X(CtxSetFlags)                                                                                 \
    X(CtxGetId)                                                                                    \
    X(CtxGetApiVersion)                                                                            \
    X(CtxGetLimit)                                                                                 \
    X(CtxSetLimit)                                                                                 \
    X(CtxGetCacheConfig)                                                                           \
    X(CtxSetCacheConfig)                                                                           \
    X(CtxEnablePeer)                                                                               \
    X(CtxDisablePeer)                                                                              \
    X(MemGetInfo)                                                                                  \
    X(MemAlloc)                                                                                    \
    X(MemFree)                                                                                     \
    X(MemAllocAsync)                                                                               \
    X(MemFreeAsync)                                                                                \
    X(MemAddressRange)                                                                             \
    X(PointerAttribute)                                                                            \
    X(ManagedAlloc)                                                                                \
    X(ManagedPiece)                                                                                \
    X(ManagedPrefetch)                                                                             \
    X(ManagedAdvise)                                                                               \
    X(ManagedAttribute)                                                                            \
    X(ManagedAttach)                                                                               \
    X(HostRegister)                                                                                \
    X(HostUnregister)                                                                              \
    X(HostFlags)                                                                                   \
    X(HostPointer)                                                                                 \
    X(PoolCreate)                                                                                  \
    X(PoolDestroy)                                                                                 \
    X(DefaultPool)                                                                                 \
    X(CurrentPool)                                                                                 \
    X(SetCurrentPool)                                                                              \
    X(PoolGetAttribute)                                                                            \
    X(PoolSetAttribute)                                                                            \
    X(PoolTrim)                                                                                    \
    X(PoolSetAccess)                                                                               \
    X(PoolGetAccess)                                                                               \
    X(AddressReserve)                                                                              \
    X(AddressFree)                                                                                 \
    X(MemCreate)                                                                                   \
    X(MemRelease)                                                                                  \
    X(MemMap)                                                                                      \
    X(MemUnmap)                                                                                    \
    X(MemSetAccess)                                                                                \
    X(MemGetAccess)                                                                                \
    X(MemExport)                                                                                   \
    X(MemImport)                                                                                   \
    X(MemRetainHandle)                                                                             \
    X(MemHandleProperties)                                                                         \
    X(ArrayCreate)                                                                                 \
    X(ArrayDestroy)                                                                                \
    X(ArrayDescriptor)                                                                             \
    X(MipmapCreate)                                                                                \
    X(MipmapDestroy)                                                                               \
    X(MipmapLevel)                                                                                 \
    X(BindingCreate)                                                                               \
    X(BindingDestroy)                                                                              \
    X(BindingDescription)                                                                          \
    X(Memcpy)                                                                                      \
    X(MemcpyShaped)                                                                                \
    X(Memset)                                                                                      \
    X(StreamCreate)                                                                                \
    X(StreamDestroy)                                                                               \
    X(StreamSynchronize)                                                                           \
    X(StreamQuery)                                                                                 \
    X(StreamWaitEvent)                                                                             \
    X(StreamInfo)                                                                                  \
    X(StreamGetAttribute)                                                                          \
    X(StreamSetAttribute)                                                                          \
    X(StreamCopyAttributes)                                                                        \
    X(StreamValues)                                                                                \
    X(StreamCallback)                                                                              \
    X(CallbackListen)                                                                              \
    X(EventCreate)                                                                                 \
    X(EventDestroy)                                                                                \
    X(EventRecord)                                                                                 \
    X(EventQuery)                                                                                  \
    X(EventSynchronize)                                                                            \
    X(EventElapsed)                                                                                \
    X(ModuleLoad)                                                                                  \
    X(ModuleUnload)                                                                                \
    X(ModuleGetFunction)                                                                           \
    X(ModuleFunctions)                                                                             \
    X(ModuleGetGlobal)                                                                             \
    X(LinkCreate)                                                                                  \
    X(LinkPtx)                                                                                     \
    X(LibraryLoad)                                                                                 \
    X(LibraryUnload)                                                                               \
    X(LibraryGetKernel)                                                                            \
    X(LibraryKernels)                                                                              \
    X(LibraryGetModule)                                                                            \
    X(KernelGetFunction)                                                                           \
    X(KernelGetLibrary)                                                                            \
    X(FuncInfo)                                                                                    \
    X(FuncGetModule)                                                                               \
    X(FuncGetAttribute)                                                                            \
    X(FuncSetAttribute)                                                                            \
    X(FuncLoaded)                                                                                  \
    X(Launch)                                                                                      \
    X(Occupancy)                                                                                   \
    X(GraphCreate)                                                                                 \
    X(GraphDestroy)                                                                                \
    X(GraphClone)                                                                                  \
    X(GraphAddNode)                                                                                \
    X(GraphDestroyNode)                                                                            \
    X(GraphNodeParams)                                                                             \
    X(GraphNodeSetParams)                                                                          \
    X(GraphSetCooperative)                                                                         \
    X(GraphFindInClone)                                                                            \
    X(GraphContents)                                                                               \
    X(GraphAddEdges)                                                                               \
    X(GraphRemoveEdges)                                                                            \
    X(GraphInstantiate)                                                                            \
    X(GraphLaunch)                                                                                 \
    X(GraphUpload)                                                                                 \
    X(ExecDestroy)                                                                                 \
    X(ExecFlags)                                                                                   \
    X(ExecUpdate)                                                                                  \
    X(ExecSetParams)                                                                               \
    X(ExecSetEnabled)                                                                              \
    X(ExecGetEnabled)                                                                              \
    X(CaptureBegin)                                                                                \
    X(CaptureEnd)                                                                                  \
    X(CaptureInfo)                                                                                 \
    X(CaptureUpdate)                                                                               \
    X(Drain)                                                                                       \
    X(Snapshot)                                                                                    \
    X(SnapshotCopy)                                                                                \
    X(Detach)                                                                                      \
    X(Reinstate)

enum class Op : uint16_t {
#define FLOWGPU_EMU_OP(name) name,
    FLOWGPU_EMU_OPS(FLOWGPU_EMU_OP)
#undef FLOWGPU_EMU_OP
        Count
};

constexpr uint16_t kFlagPerThreadStream = 1;
constexpr int kCaptureModeShift = 1; // of the calling thread, in two bits of the flags

struct RequestHeader {
    uint32_t size; // of the payload behind the header
    Op op;
    uint16_t flags;
    uint64_t context; // current context of the calling thread, 0 if none
    uint64_t thread;  // kernel id of the calling thread
};
static_assert(sizeof(RequestHeader) == 24);

struct ReplyHeader {
    uint32_t size;
    int32_t result; // CUresult or one of the answers above
};
static_assert(sizeof(ReplyHeader) == 8);

// How a copy or a memset behaves towards its caller.
enum class Ordering : uint8_t { kSync, kAsync };
enum class MemSide : uint8_t { kHost, kDevice, kUnified };

// Kinds of host functions that a stream calls.
enum class HostKind : uint8_t { kHostFunc, kStreamCallback };

struct LaunchShape {
    uint32_t grid[3];
    uint32_t block[3];
    uint32_t shared;
    uint32_t cooperative;
};

class Writer {
  public:
    template <class T> void put(const T& value) {
        static_assert(std::is_trivially_copyable_v<T>);
        put_bytes(&value, sizeof value);
    }
    void put_bytes(const void* data, size_t size) {
        const size_t at = buffer_.size();
        buffer_.resize(at + size);
        if (size != 0) {
            std::memcpy(buffer_.data() + at, data, size);
        }
    }
    void put_blob(const void* data, size_t size) {
        put<uint64_t>(size);
        put_bytes(data, size);
    }
    void put_string(std::string_view text) { put_blob(text.data(), text.size()); }
    std::vector<uint8_t>& buffer() { return buffer_; }
    const std::vector<uint8_t>& buffer() const { return buffer_; }

  private:
    std::vector<uint8_t> buffer_;
};

// Reads what a Writer wrote. A message that is too short reads as zeros and clears good().
class Reader {
  public:
    Reader(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}
    template <class T> T take() {
        static_assert(std::is_trivially_copyable_v<T>);
        T value{};
        if (const uint8_t* from = take_bytes(sizeof(T))) {
            std::memcpy(&value, from, sizeof value);
        }
        return value;
    }
    const uint8_t* take_bytes(size_t size) {
        if (static_cast<size_t>(end_ - at_) < size) {
            good_ = false;
            at_ = end_;
            return nullptr;
        }
        const uint8_t* from = at_;
        at_ += size;
        return from;
    }
    std::string_view take_blob() {
        const auto size = take<uint64_t>();
        const uint8_t* from = take_bytes(size);
        return from == nullptr ? std::string_view()
                               : std::string_view(reinterpret_cast<const char*>(from), size);
    }
    std::string take_string() { return std::string(take_blob()); }
    size_t left() const { return static_cast<size_t>(end_ - at_); }
    bool good() const { return good_; }

  private:
    const uint8_t* at_;
    const uint8_t* end_;
    bool good_ = true;
};

} // namespace flowgpu::emu
