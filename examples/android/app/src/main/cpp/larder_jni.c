/* The native methods of larder.sample.Larder, over larder.h.
 *
 * Texts cross as byte arrays of UTF-8, with a NUL at the end on the way in: strings of JNI are in a modified UTF-8, which has other
 * bytes for NUL and for characters beyond U+FFFF. An error is thrown as larder.sample.LarderException.
 */
#include <jni.h>
#include <larder.h>
#include <stdint.h>
#include <string.h>

/* NULL, with an OutOfMemoryError, if the array cannot be made. */
static jbyteArray array_of(JNIEnv *env, const char *text, size_t length) {
    jbyteArray array = (*env)->NewByteArray(env, (jsize)length);
    if (array) (*env)->SetByteArrayRegion(env, array, 0, (jsize)length, (const jbyte *)text);
    return array;
}

/* NULL, with an exception, if the bytes cannot be had. */
static const char *borrow(JNIEnv *env, jbyteArray array) {
    return (const char *)(*env)->GetByteArrayElements(env, array, NULL);
}

static void give_back(JNIEnv *env, jbyteArray array, const char *bytes) {
    if (bytes) (*env)->ReleaseByteArrayElements(env, array, (jbyte *)bytes, JNI_ABORT);
}

static void throw_error(JNIEnv *env, const char *sentence) {
    jbyteArray bytes = array_of(env, sentence, strlen(sentence));
    jclass type = bytes ? (*env)->FindClass(env, "larder/sample/LarderException") : NULL;
    jmethodID make = type ? (*env)->GetMethodID(env, type, "<init>", "([B)V") : NULL;
    jthrowable exception = make ? (*env)->NewObject(env, type, make, bytes) : NULL;
    if (exception) (*env)->Throw(env, exception);
}

/* The array of a text that the library returned, or an exception. Frees both strings. */
static jbyteArray result_of(JNIEnv *env, char *text, char *error) {
    jbyteArray array = NULL;
    if (text && !(*env)->ExceptionCheck(env)) array = array_of(env, text, strlen(text));
    if (!text && !(*env)->ExceptionCheck(env)) throw_error(env, error ? error : "larder gave no reason");
    larder_string_free(text);
    larder_string_free(error);
    return array;
}

JNIEXPORT jlong JNICALL Java_larder_sample_Larder_load(JNIEnv *env, jclass type, jbyteArray path, jbyteArray options) {
    (void)type;
    char *error = NULL;
    larder_model *model = NULL;
    const char *path_bytes = borrow(env, path);
    const char *options_bytes = path_bytes ? borrow(env, options) : NULL;
    if (options_bytes) {
        model = larder_load(path_bytes, options_bytes, &error);
        if (!model) throw_error(env, error ? error : "larder gave no reason");
    }
    larder_string_free(error);
    give_back(env, options, options_bytes);
    give_back(env, path, path_bytes);
    return (jlong)(intptr_t)model;
}

/* The object whose method gets the pieces, on the thread that generates: a JNIEnv belongs to one thread. */
struct receiver {
    JNIEnv *env;
    jobject object;
    jmethodID piece;
};

/* An exception ends the answer, and is thrown when the native method returns. larder makes no further call behind `false`. */
static bool on_text(const char *text, size_t length, void *user_data) {
    const struct receiver *to = user_data;
    JNIEnv *env = to->env;
    jbyteArray piece = array_of(env, text, length);
    if (!piece) return false;
    jboolean goes_on = (*env)->CallBooleanMethod(env, to->object, to->piece, piece);
    /* All pieces of an answer come within one native call, and Android has room for 512 local references in it. */
    (*env)->DeleteLocalRef(env, piece);
    return !(*env)->ExceptionCheck(env) && goes_on;
}

JNIEXPORT jbyteArray JNICALL Java_larder_sample_Larder_generate(JNIEnv *env, jclass type, jlong model, jbyteArray prompt,
                                                                jbyteArray options, jobject pieces) {
    (void)type;
    jclass receiver_type = (*env)->GetObjectClass(env, pieces);
    struct receiver to = {env, pieces, (*env)->GetMethodID(env, receiver_type, "piece", "([B)Z")};
    char *error = NULL, *answer = NULL;
    const char *prompt_bytes = to.piece ? borrow(env, prompt) : NULL;
    const char *options_bytes = prompt_bytes ? borrow(env, options) : NULL;
    if (options_bytes) {
        answer = larder_generate((larder_model *)(intptr_t)model, prompt_bytes, options_bytes, on_text, &to, &error);
    }
    give_back(env, options, options_bytes);
    give_back(env, prompt, prompt_bytes);
    return result_of(env, answer, error);
}

JNIEXPORT jbyteArray JNICALL Java_larder_sample_Larder_stats(JNIEnv *env, jclass type, jlong model) {
    (void)type;
    char *error = NULL;
    char *stats = larder_stats((larder_model *)(intptr_t)model, &error);
    return result_of(env, stats, error);
}

JNIEXPORT void JNICALL Java_larder_sample_Larder_free(JNIEnv *env, jclass type, jlong model) {
    (void)env;
    (void)type;
    larder_free((larder_model *)(intptr_t)model);
}
