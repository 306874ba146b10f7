#include "environment.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "passage.h"
#include "table.h"

namespace flowgpu::rewind::environment {

namespace {

std::mutex mutex;

using Lock = std::lock_guard<std::mutex>;

char visible_devices[4096]; // empty: as the environment has them

// What the driver's first life has found in the environment, until its cuInit has succeeded or when
// it first asked, for the next ones: the program may have changed it since, or written over it, as
// a process title does.
struct Variable {
    const char* name;
    char* value; // null: there was none
};
Table<Variable, 256> variables;
char texts[1 << 15];
size_t texts_used;
bool is_kept;

Variable* known_row(const char* name) {
    for (Variable& row : variables)
        if (strcmp(row.name, name) == 0)
            return &row;
    return nullptr;
}

// The text that is there already, a copy, or null where there is no room.
char* kept_text(const char* text, char* there) {
    if (there && strcmp(text, there) == 0)
        return there;
    const size_t bytes = strlen(text) + 1;
    if (bytes > sizeof texts - texts_used)
        return nullptr;
    char* place = texts + texts_used;
    texts_used += bytes;
    return static_cast<char*>(memcpy(place, text, bytes));
}

} // namespace

char* get(const char* name) {
    if (*visible_devices && strcmp(name, "CUDA_VISIBLE_DEVICES") == 0)
        return visible_devices;
    Lock lock(mutex);
    Variable* known = known_row(name);
    if (known && life > 1)
        return known->value;
    char* found = getenv(name);
    if (known && is_kept)
        return found;
    char* value = found ? kept_text(found, known ? known->value : nullptr) : nullptr;
    if (found && !value)
        return found; // the next life asks the environment
    if (known)
        known->value = value;
    else if (const char* copy = kept_text(name, nullptr))
        if (Variable* row = variables.add())
            *row = {copy, value};
    return found;
}

bool see_devices(const char* visible, bool sees_variables) {
    const size_t length = strnlen(visible, sizeof visible_devices);
    if (length == sizeof visible_devices || !sees_variables)
        return false;
    memcpy(visible_devices, visible, length + 1);
    return true;
}

void keep() {
    Lock lock(mutex);
    is_kept = true;
}

} // namespace flowgpu::rewind::environment
