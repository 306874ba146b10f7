// What tests in C++ assert: the process ends with the place and the words of what does not hold.
#ifndef FLOWGPU_COMMON_CHECK_H
#define FLOWGPU_COMMON_CHECK_H

#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                        \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

#endif
