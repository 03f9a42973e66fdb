/* Stands in for libnvidia-ml.so.1: as much of NVML's interface as the agent calls, answering from the environment. */
#include <stdlib.h>
#include <string.h>
#include <stdio.h>

typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci_info;
typedef struct { void *device; unsigned long long type, data; unsigned gpu, compute; } event_data;
typedef struct { unsigned field, scope; long long at, latency; unsigned type, result; union { unsigned ui; double d; } value; } field_value;

static int number(const char *name, int otherwise) { const char *text = getenv(name); return text ? atoi(text) : otherwise; }
static int index_of(void *device) { return (int)(size_t)device - 1; }
static int lost(void *device) { return index_of(device) == number("MOCK_LOST", -1); }

int nvmlInitWithFlags(unsigned flags) { return number("MOCK_INIT", 0); }
const char *nvmlErrorString(int code) { return "mock error"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = number("MOCK_GPUS", 2); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = (void *)(size_t)(index + 1); return 0; }
int nvmlDeviceGetPciInfo_v3(void *device, pci_info *info) {
    if (lost(device)) return 15;
    memset(info, 0, sizeof *info);
    snprintf(info->bus_id, sizeof info->bus_id, "00000000:%02X:00.0", 0x3b + index_of(device));
    return 0;
}
int nvmlDeviceGetRemappedRows(void *d, unsigned *c, unsigned *u, unsigned *pending, unsigned *failed) {
    *c = *u = 0; *pending = number("MOCK_PENDING", 0); *failed = number("MOCK_FAILED", 0); return 0;
}
int nvmlDeviceGetTotalEccErrors(void *d, int error, int kind, unsigned long long *count) {
    *count = number("MOCK_ECC", 0); return number("MOCK_ECC_ANSWER", 0);
}
int nvmlDeviceGetFieldValues(void *d, int count, field_value *values) {
    values[0].result = values[0].field == 230 ? 0 : 3; values[0].value.ui = number("MOCK_RECOVERY", 0); return 0;
}
int nvmlEventSetCreate(void **set) { *set = (void *)1; return 0; }
int nvmlDeviceRegisterEvents(void *d, unsigned long long types, void *set) { return 0; }
int nvmlEventSetWait_v2(void *set, event_data *data, unsigned timeout_ms) {
    static int told = 0;
    if (told++ || !number("MOCK_XID", 0)) return 10;
    data->device = (void *)1; data->type = 8; data->data = number("MOCK_XID", 0); return 0;
}
