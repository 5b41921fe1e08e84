// Collectives between the CPU devices of one process, as XLA custom calls: a device brings its message, sees those of
// the others as soon as they are there, and goes on. XLA's own have every device wait twice, asleep.
//
// A device has two places for messages, one for its even and one for its odd meetings. It writes a message into its
// place and then stores the meeting's number; who reads that number finds the message. A device that comes to meeting
// n + 2 has seen all others at n + 1, so all of them are done with the message of meeting n, whose place it takes.

#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "xla/ffi/api/c_api.h"

#ifndef PATIENCE_S
#define PATIENCE_S 600  // for devices that don't come
#endif

enum {
  MOST_DEVICES = 64,
  ROOMS = 32,
  BLOCK = 512,       // columns that are summed at a time: those of all rows stay in a core's cache
  SPIN_NS = 100000,  // looking at the others before sleeping, where every device has a core
  LOOKS = 32,        // between two looks at the clock
};

typedef struct {
  _Alignas(128) atomic_uint_fast64_t arrived;  // the last meeting for which this device's message is there
  _Alignas(128) uint64_t meetings;             // that this device has come to; its own, as is what follows
  size_t bytes[2];
  size_t capacity[2];
  char *message[2];
} Seat;

// Where the devices of one execution of a program meet.
typedef struct {
  bool taken;
  int64_t run;
  uint64_t used;  // when, as a count
  atomic_int inside;
  atomic_int asleep;
  pthread_mutex_t lock;
  pthread_cond_t news;
  Seat seats[MOST_DEVICES];
} Room;

static Room rooms[ROOMS];
static uint64_t uses;
static atomic_flag registry = ATOMIC_FLAG_INIT;  // held for a look at the rooms

static void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

static int64_t nanoseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static int cores(void) {
  static atomic_int found;
  int n = atomic_load_explicit(&found, memory_order_relaxed);
  if (n > 0) return n;
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) n = CPU_COUNT(&set);
#endif
  if (n <= 0) n = (int)sysconf(_SC_NPROCESSORS_ONLN);
  if (n <= 0) n = 1;
  atomic_store_explicit(&found, n, memory_order_relaxed);
  return n;
}

// The room of an execution; the one that was used longest ago becomes that of a new one. Launches of programs over
// several devices follow one another, so that one in use is far from that. NULL: all are in use.
static Room *enter(int64_t run) {
  for (int tries = 0; atomic_flag_test_and_set_explicit(&registry, memory_order_acquire); tries++) {
    if (tries < 1000) pause_briefly();
    else sched_yield();
  }
  Room *room = NULL, *oldest = NULL;
  for (int i = 0; i < ROOMS && room == NULL; i++) {
    if (rooms[i].taken && rooms[i].run == run) room = &rooms[i];
    else if (atomic_load(&rooms[i].inside) == 0 && (oldest == NULL || rooms[i].used < oldest->used)) oldest = &rooms[i];
  }
  if (room == NULL && oldest != NULL) {
    room = oldest;
    if (!room->taken) {
      pthread_mutex_init(&room->lock, NULL);
      pthread_cond_init(&room->news, NULL);
    }
    room->taken = true;
    room->run = run;
    for (int i = 0; i < MOST_DEVICES; i++) {
      atomic_store(&room->seats[i].arrived, 0);
      room->seats[i].meetings = 0;
    }
  }
  if (room != NULL) {
    room->used = ++uses;
    atomic_fetch_add(&room->inside, 1);
  }
  atomic_flag_clear_explicit(&registry, memory_order_release);
  return room;
}

static void leave(Room *room) { atomic_fetch_sub(&room->inside, 1); }

// This device's place for the message of its next meeting, or NULL without memory.
static char *prepare(Seat *seat, size_t bytes) {
  int place = (int)(++seat->meetings & 1);
  if (seat->capacity[place] < bytes || seat->message[place] == NULL) {
    free(seat->message[place]);
    seat->capacity[place] = 0;
    void *memory = NULL;
    if (posix_memalign(&memory, 128, bytes > 0 ? bytes : 1) == 0) seat->capacity[place] = bytes;
    seat->message[place] = memory;
    if (memory == NULL) return NULL;
  }
  seat->bytes[place] = bytes;
  return seat->message[place];
}

static bool all_there(Room *room, int devices, uint64_t meeting) {
  for (int i = 0; i < devices; i++) {
    if (atomic_load(&room->seats[i].arrived) < meeting) return false;
  }
  return true;
}

// Tell the others that the message is there, and wait for theirs; false if some don't come.
static bool meet(Room *room, int devices, int device) {
  uint64_t meeting = room->seats[device].meetings;
  atomic_store(&room->seats[device].arrived, meeting);
  if (atomic_load(&room->asleep) > 0) {
    pthread_mutex_lock(&room->lock);
    pthread_cond_broadcast(&room->news);
    pthread_mutex_unlock(&room->lock);
  }
  if (devices <= cores()) {
    int64_t end = nanoseconds() + SPIN_NS;
    do {
      for (int i = 0; i < LOOKS; i++) {
        if (all_there(room, devices, meeting)) return true;
        pause_briefly();
      }
    } while (nanoseconds() < end);
  }
  struct timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += PATIENCE_S;
  bool there;
  pthread_mutex_lock(&room->lock);
  atomic_fetch_add(&room->asleep, 1);
  for (int late = 0; !(there = all_there(room, devices, meeting)) && late == 0;) {
    late = pthread_cond_timedwait(&room->news, &room->lock, &until);
  }
  atomic_fetch_sub(&room->asleep, 1);
  pthread_mutex_unlock(&room->lock);
  return there;
}

// --- sums ------------------------------------------------------------------------------------------------------------

typedef struct {
  const float *base;  // row i begins at base + i * stride, or is rows[i]
  size_t stride;
  const float *const *rows;
} Rows;

static const float *row_of(const Rows *rows, size_t i) {
  return rows->rows != NULL ? rows->rows[i] : rows->base + i * rows->stride;
}

// Sum of rows first .. first + n by a binary tree of neighbours, of `count` columns (at most BLOCK) from column `at` on.
static void sum_block(const Rows *rows, size_t first, size_t n, size_t at, size_t count, float *out) {
  const float *a = row_of(rows, first) + at;
  if (n == 1) {
    memcpy(out, a, count * sizeof(float));
  } else if (n == 2) {
    const float *b = row_of(rows, first + 1) + at;
    for (size_t i = 0; i < count; i++) out[i] = a[i] + b[i];
  } else {
    float right[BLOCK];
    sum_block(rows, first, n / 2, at, count, out);
    sum_block(rows, first + n / 2, n - n / 2, at, count, right);
    for (size_t i = 0; i < count; i++) out[i] = out[i] + right[i];
  }
}

static void tree_sum(const Rows *rows, size_t n, size_t columns, float *out) {
  for (size_t at = 0; at < columns; at += BLOCK) {
    size_t count = columns - at < BLOCK ? columns - at : BLOCK;
    sum_block(rows, 0, n, at, count, out + at);
  }
}

// --- custom calls ----------------------------------------------------------------------------------------------------

static XLA_FFI_Error *error_of(XLA_FFI_CallFrame *frame, XLA_FFI_Error_Code code, const char *message) {
  XLA_FFI_Error_Create_Args args = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, NULL, message, code};
  return frame->api->XLA_FFI_Error_Create(&args);
}

// XLA asks a handler for its version with a call that has this extension.
static bool tells_version(XLA_FFI_CallFrame *frame) {
  XLA_FFI_Extension_Base *base = frame->extension_start;
  if (base == NULL || base->type != XLA_FFI_Extension_Metadata) return false;
  XLA_FFI_Metadata *metadata = ((XLA_FFI_Metadata_Extension *)base)->metadata;
  metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  metadata->api_version.minor_version = XLA_FFI_API_MINOR;
  metadata->traits = 0;
  metadata->state_type_id.type_id = 0;
  return true;
}

static size_t width_of(XLA_FFI_DataType dtype) {
  switch (dtype) {
    case XLA_FFI_DataType_PRED:
    case XLA_FFI_DataType_S8:
    case XLA_FFI_DataType_U8:
      return 1;
    case XLA_FFI_DataType_S16:
    case XLA_FFI_DataType_U16:
    case XLA_FFI_DataType_F16:
    case XLA_FFI_DataType_BF16:
      return 2;
    case XLA_FFI_DataType_S32:
    case XLA_FFI_DataType_U32:
    case XLA_FFI_DataType_F32:
      return 4;
    case XLA_FFI_DataType_S64:
    case XLA_FFI_DataType_U64:
    case XLA_FFI_DataType_F64:
      return 8;
    default:
      return 0;
  }
}

typedef struct {
  const char *data;  // [batch, rows, columns]
  size_t batch, rows, columns, width;
  int device, devices;
  char *out;
  Room *room;  // NULL for one device
  Seat *seat;
  char *message;
} Call;

// What a call is about, and this device's place for its message of `bytes` a batch; an error, or NULL.
static XLA_FFI_Error *begin(XLA_FFI_CallFrame *frame, Call *call, bool sums) {
  const XLA_FFI_Buffer *x = frame->args.args[0], *index = frame->args.args[1], *out = frame->rets.rets[0];
  const XLA_FFI_Scalar *devices = frame->attrs.attrs[0];
  call->width = width_of(x->dtype);
  if (x->rank < 2 || call->width == 0 || (sums && x->dtype != XLA_FFI_DataType_F32)) {
    return error_of(frame, XLA_FFI_Error_Code_INVALID_ARGUMENT, "lockstep: a message of a shape or type that can't be");
  }
  call->data = x->data;
  call->out = out->data;
  call->columns = (size_t)x->dims[x->rank - 1];
  call->rows = (size_t)x->dims[x->rank - 2];
  call->batch = 1;
  for (int64_t i = 0; i < x->rank - 2; i++) call->batch *= (size_t)x->dims[i];
  call->device = *(const int32_t *)index->data;
  call->devices = (int)*(const int64_t *)devices->value;
  if (call->devices < 1 || call->devices > MOST_DEVICES || call->device < 0 || call->device >= call->devices) {
    return error_of(frame, XLA_FFI_Error_Code_INVALID_ARGUMENT, "lockstep: more than 64 devices, or none of them");
  }
  call->room = NULL;
  if (call->devices == 1) return NULL;
  XLA_FFI_RunId_Get_Args run = {XLA_FFI_RunId_Get_Args_STRUCT_SIZE, NULL, frame->ctx, 0};
  XLA_FFI_Error *error = frame->api->XLA_FFI_RunId_Get(&run);
  if (error != NULL) return error;
  call->room = enter(run.run_id);
  if (call->room == NULL) {
    return error_of(frame, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "lockstep: too many programs run at once");
  }
  call->seat = &call->room->seats[call->device];
  size_t rows = sums ? 1 : call->rows;
  call->message = prepare(call->seat, call->batch * rows * call->columns * call->width);
  if (call->message == NULL) {
    leave(call->room);
    return error_of(frame, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "lockstep: no memory for a device's message");
  }
  return NULL;
}

// Wait for the messages of all devices; an error, or NULL and where they are.
static XLA_FFI_Error *exchange(XLA_FFI_CallFrame *frame, Call *call, const char *messages[]) {
  char text[160];
  if (!meet(call->room, call->devices, call->device)) {
    snprintf(text, sizeof text, "lockstep: device %d of %d has waited %d s for the others", call->device, call->devices,
             PATIENCE_S);
    return error_of(frame, XLA_FFI_Error_Code_DEADLINE_EXCEEDED, text);
  }
  int place = (int)(call->seat->meetings & 1);
  for (int i = 0; i < call->devices; i++) {
    const Seat *seat = &call->room->seats[i];
    if (seat->bytes[place] != call->seat->bytes[place]) {
      snprintf(text, sizeof text, "lockstep: devices %d and %d met with messages of %zu and %zu bytes", call->device, i,
               call->seat->bytes[place], seat->bytes[place]);
      return error_of(frame, XLA_FFI_Error_Code_INTERNAL, text);
    }
    messages[i] = seat->message[place];
  }
  return NULL;
}

// Sum over the rows of all devices, f32 [..., rows, columns] to [..., columns]: a device's own by a binary tree of
// neighbours, then those sums by another. Arguments: the rows, and the device's index; attribute: number of devices.
XLA_FFI_Error *lockstep_tree_sum(XLA_FFI_CallFrame *frame) {
  if (tells_version(frame)) return NULL;
  Call call;
  XLA_FFI_Error *error = begin(frame, &call, true);
  if (error != NULL) return error;
  float *own = (float *)(call.room == NULL ? call.out : call.message);
  for (size_t i = 0; i < call.batch; i++) {
    Rows rows = {(const float *)call.data + i * call.rows * call.columns, call.columns, NULL};
    tree_sum(&rows, call.rows, call.columns, own + i * call.columns);
  }
  if (call.room == NULL) return NULL;
  const char *messages[MOST_DEVICES];
  error = exchange(frame, &call, messages);
  if (error == NULL) {
    Rows rows = {NULL, 0, (const float *const *)messages};
    tree_sum(&rows, (size_t)call.devices, call.batch * call.columns, (float *)call.out);
  }
  leave(call.room);
  return error;
}

// The rows of all devices in the devices' order, [..., rows, columns] to [..., devices * rows, columns], of any type.
// Arguments and attribute as above.
XLA_FFI_Error *lockstep_gather(XLA_FFI_CallFrame *frame) {
  if (tells_version(frame)) return NULL;
  Call call;
  XLA_FFI_Error *error = begin(frame, &call, false);
  if (error != NULL) return error;
  size_t bytes = call.rows * call.columns * call.width;
  if (call.room == NULL) {
    memcpy(call.out, call.data, call.batch * bytes);
    return NULL;
  }
  memcpy(call.message, call.data, call.batch * bytes);
  const char *messages[MOST_DEVICES];
  error = exchange(frame, &call, messages);
  for (size_t i = 0; error == NULL && i < call.batch; i++) {
    for (int j = 0; j < call.devices; j++) {
      memcpy(call.out + (i * (size_t)call.devices + (size_t)j) * bytes, messages[j] + i * bytes, bytes);
    }
  }
  leave(call.room);
  return error;
}
