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
#define PATIENCE_S 120  // for devices that don't come; XLA's own collectives have less
#endif

enum {
  MOST_DEVICES = 64,
  ROOMS = 32,
  BLOCK = 512,       // columns that are summed at a time: those of all rows stay in a core's cache
  SPIN_NS = 100000,  // looking at the others before sleeping, where every device has a core; less after it was in vain
  LEAST_SPIN_NS = 2000,
  LOOKS = 32,  // between two looks at the clock
};

typedef struct {
  _Alignas(128) atomic_uint_fast64_t arrived;  // the last meeting for which this device's message is there
  _Alignas(128) atomic_int occupied;           // a thread of this device is in a meeting
  uint64_t meetings;                           // that this device has come to; its own, as is what follows
  int64_t spin;                                // nanoseconds
  int64_t call[2];                             // which of the program's calls the message is for
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
  atomic_bool broken;  // one device has failed here: nobody waits any more
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

// The room of an execution; a new one takes over that in which nobody is and which was used last, whose memory is warm.
// Should that be between two meetings of another execution, then all of its devices have been at equally many, and meet
// again in another room. NULL: somebody is in each.
static Room *enter(int64_t run) {
  for (int tries = 0; atomic_flag_test_and_set_explicit(&registry, memory_order_acquire); tries++) {
    if (tries < 1000) pause_briefly();
    else sched_yield();
  }
  Room *room = NULL, *free_one = NULL;
  for (int i = 0; i < ROOMS && room == NULL; i++) {
    if (rooms[i].taken && rooms[i].run == run) room = &rooms[i];
    else if (atomic_load(&rooms[i].inside) == 0 && (free_one == NULL || rooms[i].used > free_one->used))
      free_one = &rooms[i];
  }
  if (room == NULL && free_one != NULL) {
    room = free_one;
    if (!room->taken) {
      pthread_mutex_init(&room->lock, NULL);
      pthread_cond_init(&room->news, NULL);
    }
    room->taken = true;
    room->run = run;
    atomic_store(&room->broken, false);
    for (int i = 0; i < MOST_DEVICES; i++) {
      atomic_store(&room->seats[i].arrived, 0);
      atomic_store(&room->seats[i].occupied, 0);
      room->seats[i].meetings = 0;
      room->seats[i].spin = SPIN_NS;
    }
  }
  if (room != NULL) {
    room->used = ++uses;
    atomic_fetch_add(&room->inside, 1);
  }
  atomic_flag_clear_explicit(&registry, memory_order_release);
  return room;
}

static void wake_all(Room *room) {
  pthread_mutex_lock(&room->lock);
  pthread_cond_broadcast(&room->news);
  pthread_mutex_unlock(&room->lock);
}

// Nobody waits in this room any more.
static void give_up(Room *room) {
  atomic_store(&room->broken, true);
  wake_all(room);
}

// This device's place for the message of its next meeting, or NULL without memory.
static char *prepare(Seat *seat, int64_t call, size_t bytes) {
  int place = (int)(++seat->meetings & 1);
  if (seat->capacity[place] < bytes || seat->message[place] == NULL) {
    free(seat->message[place]);
    seat->capacity[place] = 0;
    void *memory = NULL;
    if (posix_memalign(&memory, 128, bytes > 0 ? bytes : 1) == 0) seat->capacity[place] = bytes;
    seat->message[place] = memory;
    if (memory == NULL) return NULL;
  }
  seat->call[place] = call;
  seat->bytes[place] = bytes;
  return seat->message[place];
}

static bool all_there(Room *room, int devices, uint64_t meeting) {
  for (int i = 0; i < devices; i++) {
    if (atomic_load(&room->seats[i].arrived) < meeting) return false;
  }
  return true;
}

typedef enum { TOGETHER, LATE, BROKEN } Outcome;

// Tell the others that the message is there, and wait for theirs.
static Outcome meet(Room *room, int devices, int device) {
  Seat *seat = &room->seats[device];
  uint64_t meeting = seat->meetings;
  atomic_store(&seat->arrived, meeting);
  if (atomic_load(&room->asleep) > 0 && all_there(room, devices, meeting)) wake_all(room);
  if (devices <= cores()) {
    int64_t end = nanoseconds() + seat->spin;
    do {
      for (int i = 0; i < LOOKS; i++) {
        if (all_there(room, devices, meeting)) {
          seat->spin = seat->spin * 2 < SPIN_NS ? seat->spin * 2 : SPIN_NS;
          return TOGETHER;
        }
        pause_briefly();
      }
    } while (nanoseconds() < end);
    seat->spin = seat->spin / 2 > LEAST_SPIN_NS ? seat->spin / 2 : LEAST_SPIN_NS;
  }
  int64_t end = nanoseconds() + (int64_t)PATIENCE_S * 1000000000;
  Outcome outcome = TOGETHER;
  pthread_mutex_lock(&room->lock);
  atomic_fetch_add(&room->asleep, 1);
  while (!all_there(room, devices, meeting)) {
    if (atomic_load(&room->broken)) outcome = BROKEN;
    else if (nanoseconds() > end) outcome = LATE;
    if (outcome != TOGETHER) break;
    struct timespec until;  // by the wall clock, which may be set: so a second at a time, and patience by another clock
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 1;
    pthread_cond_timedwait(&room->news, &room->lock, &until);
  }
  atomic_fetch_sub(&room->asleep, 1);
  pthread_mutex_unlock(&room->lock);
  return outcome;
}

// --- sums ------------------------------------------------------------------------------------------------------------

typedef struct {
  const float *base;  // row i begins at base + i * stride, or is rows[i]
  size_t stride;
  const char *const *rows;
} Rows;

static const float *row_of(const Rows *rows, size_t i) {
  return rows->rows != NULL ? (const float *)rows->rows[i] : rows->base + i * rows->stride;
}

// Sum of rows first .. first + n by a binary tree of neighbours, of `count` columns (at most BLOCK) from column `at`.
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

static void leave(Call *call) {
  atomic_store(&call->seat->occupied, 0);
  atomic_fetch_sub(&call->room->inside, 1);
}

// What a call is about, and this device's place for its message of `bytes` a batch; an error, or NULL.
static XLA_FFI_Error *begin(XLA_FFI_CallFrame *frame, Call *call, bool sums) {
  const XLA_FFI_Buffer *x = frame->args.args[0], *index = frame->args.args[1], *out = frame->rets.rets[0];
  const XLA_FFI_Scalar *number = frame->attrs.attrs[0], *devices = frame->attrs.attrs[1];  // sorted by name
  call->width = width_of(x->dtype);
  if (x->rank < 2 || x->dims[x->rank - 2] < 1 || call->width == 0 || (sums && x->dtype != XLA_FFI_DataType_F32)) {
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
  if (atomic_exchange(&call->seat->occupied, 1) != 0) {
    give_up(call->room);
    atomic_fetch_sub(&call->room->inside, 1);
    return error_of(frame, XLA_FFI_Error_Code_INTERNAL, "lockstep: a device is in two collectives at once");
  }
  size_t rows = sums ? 1 : call->rows;
  size_t bytes = call->batch * rows * call->columns * call->width;
  call->message = prepare(call->seat, *(const int64_t *)number->value, bytes);
  if (call->message == NULL) {
    give_up(call->room);
    leave(call);
    return error_of(frame, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "lockstep: no memory for a device's message");
  }
  return NULL;
}

// Wait for the messages of all devices; an error, or NULL and where they are.
static XLA_FFI_Error *exchange(XLA_FFI_CallFrame *frame, Call *call, const char *messages[]) {
  char text[160];
  Outcome outcome = meet(call->room, call->devices, call->device);
  if (outcome == BROKEN) return error_of(frame, XLA_FFI_Error_Code_ABORTED, "lockstep: another device has failed");
  if (outcome == LATE) {
    give_up(call->room);
    snprintf(text, sizeof text, "lockstep: device %d of %d has waited %d s for the others", call->device, call->devices,
             PATIENCE_S);
    return error_of(frame, XLA_FFI_Error_Code_DEADLINE_EXCEEDED, text);
  }
  int place = (int)(call->seat->meetings & 1);
  for (int i = 0; i < call->devices; i++) {
    const Seat *seat = &call->room->seats[i];
    if (seat->call[place] != call->seat->call[place]) {
      give_up(call->room);
      snprintf(text, sizeof text, "lockstep: devices %d and %d met in different collectives", call->device, i);
      return error_of(frame, XLA_FFI_Error_Code_INTERNAL, text);
    }
    if (seat->bytes[place] != call->seat->bytes[place]) {
      give_up(call->room);
      snprintf(text, sizeof text, "lockstep: devices %d and %d met with messages of %zu and %zu bytes", call->device, i,
               call->seat->bytes[place], seat->bytes[place]);
      return error_of(frame, XLA_FFI_Error_Code_INTERNAL, text);
    }
    messages[i] = seat->message[place];
  }
  return NULL;
}

// Sum over the rows of all devices, f32 [..., rows, columns] to [..., columns]: a device's own by a binary tree of
// neighbours, then those sums by another. Arguments: the rows, and the device's index; attributes: which of
// the program's calls it is, and the number of devices.
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
    Rows rows = {NULL, 0, messages};
    tree_sum(&rows, (size_t)call.devices, call.batch * call.columns, (float *)call.out);
  }
  leave(&call);
  return error;
}

// The rows of all devices in the devices' order, [..., rows, columns] to [..., devices * rows, columns], of any type.
// Arguments and attributes as above.
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
  leave(&call);
  return error;
}
