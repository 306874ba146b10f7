// The emulated driver, with managed memory: its device memory, which the host cannot use. Linked
// with that driver, which has another name there: dlsym finds all else in it.
#include <dlfcn.h>

#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static CUdeviceptr variable;

CUresult cuMemAllocManaged(CUdeviceptr* address, size_t bytes, unsigned flags) {
    (void)flags;
    return REAL(cuMemAlloc_v2)(address, bytes);
}

CUresult cuLibraryGetManaged(CUdeviceptr* address, size_t* bytes, CUlibrary library,
                             const char* name) {
    CUresult result = REAL(cuLibraryGetGlobal)(address, bytes, library, name);
    if (result == CUDA_SUCCESS) variable = *address;
    return result;
}

CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr address) {
    CUresult result = REAL(cuPointerGetAttribute)(data, attribute, address);
    if (result == CUDA_SUCCESS && attribute == CU_POINTER_ATTRIBUTE_IS_MANAGED &&
        address == variable)
        *(unsigned char*)data = 1;
    return result;
}
