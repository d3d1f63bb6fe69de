package larder.sample

import java.util.concurrent.locks.ReentrantLock

/** An error of larder; the message is its sentence. */
class LarderException(message: String) : Exception(message) {
    /** For the native methods, which have UTF-8. */
    @Suppress("unused")
    internal constructor(utf8: ByteArray) : this(utf8.decodeToString())
}

/**
 * A model that is loaded. Options, answers and counts are the JSON objects of larder.h.
 *
 * All functions may be called from any thread, and block it; those of the same model wait for each other.
 */
class Larder(path: String, options: String = "{}") : AutoCloseable {
    /** Held while the model is in use. */
    private val lock = ReentrantLock()

    /** Address of the model, 0 once it is freed. Guarded by the lock. */
    private var model = load(path.toNative(), options.toNative())

    @Volatile private var isClosed = false

    /**
     * Generates what follows a prompt. [onText] gets the text in pieces, on this thread; `false` ends the answer, and what it
     * throws ends it too and is thrown on. It must not call functions of this model other than [close].
     */
    fun generate(prompt: String, options: String = "{}", onText: (String) -> Boolean = { true }): String = withModel {
        val pieces = PieceReceiver { utf8 -> !isClosed && onText(utf8.decodeToString()) }
        generate(model, prompt.toNative(), options.toNative(), pieces).decodeToString()
    }

    /** Counts since the model was loaded. */
    fun stats(): String = withModel { stats(model).decodeToString() }

    /**
     * Frees the model, without waiting: an answer in progress ends before its next piece, and the thread that generates it frees
     * the model then. Closing again does nothing; other functions throw an IllegalStateException from now on.
     */
    override fun close() {
        isClosed = true
        freeIfUnused()
    }

    private fun <T> withModel(use: () -> T): T {
        check(!lock.isHeldByCurrentThread) { "the function that receives the text called its own model" }
        lock.lock()
        try {
            check(!isClosed) { "the model is closed" }
            return use()
        } finally {
            lock.unlock()
            if (isClosed) freeIfUnused()
        }
    }

    /** If another thread has the lock, that thread frees the model behind its use. */
    private fun freeIfUnused() {
        if (lock.isHeldByCurrentThread || !lock.tryLock()) return
        try {
            free(model)
            model = 0
        } finally {
            lock.unlock()
        }
    }

    /** The native code calls the method by its name. */
    private fun interface PieceReceiver {
        fun piece(utf8: ByteArray): Boolean
    }

    private companion object {
        init {
            System.loadLibrary("larder_jni")
        }

        /** UTF-8 with a NUL at the end. */
        fun String.toNative(): ByteArray {
            require('\u0000' !in this) { "a text for larder must not contain the character U+0000" }
            return "$this\u0000".encodeToByteArray()
        }

        @JvmStatic private external fun load(path: ByteArray, options: ByteArray): Long

        @JvmStatic
        private external fun generate(model: Long, prompt: ByteArray, options: ByteArray, pieces: PieceReceiver): ByteArray

        @JvmStatic private external fun stats(model: Long): ByteArray

        @JvmStatic private external fun free(model: Long)
    }
}
