// Multiplies in AMX's tiles, for ever: in the main thread by a call each, in another one with values
// in the tiles all the time where "held" is asked for. Prints a line a product, and ends with 1 if
// one is wrong.
#include <immintrin.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define ROWS 16
#define BYTES 64

static const struct {
    uint8_t palette, start, unused[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} __attribute__((aligned(64))) shape = {1, 0, {0}, {BYTES, BYTES, BYTES}, {ROWS, ROWS, ROWS}};

static uint8_t a[ROWS][BYTES], b[ROWS][BYTES];
static int32_t expected[ROWS][BYTES / 4];

static void load(void) {
    _tile_loadconfig(&shape);
    _tile_zero(0);
    _tile_loadd(1, a, BYTES);
    _tile_loadd(2, b, BYTES);
}

static int is_right(void) {
    int32_t found[ROWS][BYTES / 4];
    _tile_zero(0);
    _tile_dpbuud(0, 1, 2);
    _tile_stored(0, found, BYTES);
    return memcmp(found, expected, sizeof found) == 0;
}

static void* hold(void* argument) {
    (void)argument;
    load();
    while (is_right())
        ;
    printf("wrong\n");
    _exit(1);
}

int main(int count, char** words) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (syscall(SYS_arch_prctl, 0x1023, 18) != 0) // ARCH_REQ_XCOMP_PERM
        return 2;
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < BYTES; j++)
            a[i][j] = (uint8_t)(7 * i + j), b[i][j] = (uint8_t)(i + 3 * j);
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < BYTES / 4; j++)
            for (int k = 0; k < BYTES; k++)
                expected[i][j] += a[i][k] * b[k / 4][4 * j + k % 4];
    pthread_t thread;
    if (count > 1 && strcmp(words[1], "held") == 0)
        pthread_create(&thread, NULL, hold, NULL);
    for (long step = 0;; step++) {
        load();
        if (!is_right())
            return 1;
        _tile_release();
        printf("product %ld\n", step);
        nanosleep(&(struct timespec){0, 20000000}, NULL);
    }
}
