/* Random bytes for programs that run in a Wine before version 9, which has no bcryptprimitives.dll. See cross.sh. */
#include <windows.h>

/* RtlGenRandom, under the name that advapi32 exports. */
BOOLEAN NTAPI SystemFunction036(void *bytes, ULONG length);

__declspec(dllexport) BOOL WINAPI ProcessPrng(unsigned char *bytes, SIZE_T length)
{
    while (length > 0) {
        ULONG part = length > 0x1000000 ? 0x1000000 : (ULONG)length;
        if (!SystemFunction036(bytes, part))
            return FALSE;
        bytes += part;
        length -= part;
    }
    return TRUE;
}
