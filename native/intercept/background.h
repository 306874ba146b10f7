// Threads of ours in the program's process.
#ifndef FLOWGPU_INTERCEPT_BACKGROUND_H
#define FLOWGPU_INTERCEPT_BACKGROUND_H

#include <pthread.h>
#include <signal.h>

namespace flowgpu {

// Nobody waits for its end. False: the system has no room for it.
inline bool start_in_background(void* (*body)(void*), void* argument) {
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old); // the program's signals are for the program's threads
    pthread_t thread;
    const bool started = pthread_create(&thread, nullptr, body, argument) == 0;
    if (started)
        pthread_detach(thread);
    pthread_sigmask(SIG_SETMASK, &old, nullptr);
    return started;
}

} // namespace flowgpu

#endif
