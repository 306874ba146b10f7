/* Takes a checkpoint of its job into argv[1], and says how that went. */
#include "flowgpu/checkpoint.h"

int main(int count, char** words) {
    flowgpu_checkpoint made;
    int state = flowgpu_checkpoint_take(&made, words[count - 1]);
    if (state == FLOWGPU_FAILED) {
        printf("failed %s\n", made.error);
        return 0;
    }
    printf("cut %d\n", state == FLOWGPU_RUNNING || state == FLOWGPU_DONE);
    fflush(stdout);
    state = flowgpu_checkpoint_wait(&made);
    printf("done %d restored %d\n", state == FLOWGPU_DONE, made.restored);
    return 0;
}
