/* Preloaded into a server: its wall clock runs as many microseconds ahead as the file that CLOCK_SHIFT names holds (an
   int64). Clocks that only measure (CLOCK_MONOTONIC) are left alone. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static int64_t ahead(void) {
  static volatile int64_t *shift;
  if (!shift) {
    const char *path = getenv("CLOCK_SHIFT");
    int file = path ? open(path, O_RDONLY) : -1;
    void *place = file < 0 ? MAP_FAILED : mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
    static int64_t none;
    if (file >= 0) close(file);
    shift = place == MAP_FAILED ? &none : place;
  }
  return *shift;
}

int clock_gettime(clockid_t clock, struct timespec *out) {
  int failed = syscall(SYS_clock_gettime, clock, out);
  if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
    int64_t micros = out->tv_sec * 1000000LL + out->tv_nsec / 1000 + ahead();
    out->tv_sec = micros / 1000000;
    out->tv_nsec = micros % 1000000 * 1000;
  }
  return failed;
}

int gettimeofday(struct timeval *restrict out, void *restrict zone) {
  struct timespec now;
  (void)zone;
  if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
  out->tv_sec = now.tv_sec;
  out->tv_usec = now.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *out) {
  struct timespec now;
  if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
  if (out) *out = now.tv_sec;
  return now.tv_sec;
}
