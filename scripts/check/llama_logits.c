// The logits of llama.cpp for given tokens: llama_logits MODEL IDS OUT THREADS. IDS has numbers in text form; OUT gets
// [tokens, vocabulary] of f32. compare_logits.py compiles and runs it.

#include <stdio.h>
#include <stdlib.h>

#include "llama.h"

enum { BATCH = 512, MOST = 1 << 16 };

static void quiet(enum ggml_log_level level, const char *text, void *none) {
    (void)none;
    if (level == GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
}

static int fail(const char *what) {
    fprintf(stderr, "llama_logits: %s\n", what);
    return 1;
}

int main(int count, char **args) {
    static llama_token ids[MOST];
    if (count != 5) return fail("needs MODEL IDS OUT THREADS");
    FILE *in = fopen(args[2], "r"), *out = fopen(args[3], "wb");
    if (!in || !out) return fail("cannot open IDS or OUT");
    int tokens = 0;
    while (tokens < MOST && fscanf(in, "%d", &ids[tokens]) == 1) tokens++;

    llama_log_set(quiet, NULL);
    ggml_backend_load_all();
    llama_backend_init();
    struct llama_model_params how = llama_model_default_params();
    how.n_gpu_layers = 0;
    struct llama_model *model = llama_model_load_from_file(args[1], how);
    if (!model) return fail("cannot load the model");
    struct llama_context_params usual = llama_context_default_params();
    usual.n_ctx = tokens;
    usual.n_batch = usual.n_ubatch = BATCH;
    usual.n_threads = usual.n_threads_batch = atoi(args[4]);
    struct llama_context *context = llama_init_from_model(model, usual);
    if (!context) return fail("cannot make a context");
    size_t vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));

    struct llama_batch batch = llama_batch_init(BATCH, 0, 1);
    for (int first = 0; first < tokens; first += BATCH) {
        batch.n_tokens = tokens - first < BATCH ? tokens - first : BATCH;
        for (int i = 0; i < batch.n_tokens; i++) {
            batch.token[i] = ids[first + i];
            batch.pos[i] = first + i;
            batch.n_seq_id[i] = 1;
            batch.seq_id[i][0] = 0;
            batch.logits[i] = 1;
        }
        if (llama_decode(context, batch)) return fail("a batch failed");
        size_t values = vocabulary * batch.n_tokens;
        if (fwrite(llama_get_logits(context), sizeof(float), values, out) != values) return fail("cannot write OUT");
    }
    llama_batch_free(batch);
    llama_free(context);
    llama_model_free(model);
    return fclose(out) ? fail("cannot write OUT") : 0;
}
