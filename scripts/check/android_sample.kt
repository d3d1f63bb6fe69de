/** Checks of examples/android's class Larder on a Java machine: `android_sample.sh` compiles and runs them. */
package larder.sample

import java.io.File
import java.util.concurrent.atomic.AtomicInteger
import kotlin.concurrent.thread
import kotlin.system.exitProcess

private const val PROMPT = "The old man looked at the door, and"
private const val LOAD = """{"cache": "16x", "threads": 2}"""
private const val GENERATE = """{"max-tokens": 30, "temperature": 0}"""
private const val ENDLESS = """{"max-tokens": 400, "temperature": 0, "ignore-eos": true}"""

/** What the C program wrote for PROMPT and for NON_ASCII with GENERATE. */
private class Expected(val text: String, val nonAsciiText: String)

/** UTF-8 of two, three and four bytes; the last has other bytes in the strings of JNI. */
private const val NON_ASCII = "“Où?” – 木 𝄞 said he"

private lateinit var demo: String
private lateinit var expected: Expected

private val checks = listOf(
    Check("the text is that of the program in C", ::sameText),
    Check("UTF-8 of every length reaches the model", ::unicode),
    Check("an error is an exception with a sentence", ::errors),
    Check("the function that gets the text stops it", ::stops),
    Check("a long answer keeps no references, which -Xcheck:jni reports", ::longAnswer),
    Check("an exception of that function is thrown on", ::exceptionsOfTheCallback),
    Check("that function cannot use its own model", ::reentrance),
    Check("several threads take turns, and models are independent", ::threads),
    Check("a closed model is an exception", ::useAfterClose),
    Check("closing ends an answer in progress, and frees the model behind it", ::closeWhileGenerating),
    Check("closing from the function that gets the text", ::closeInCallback),
    Check("threads that generate, count and close at once", ::race),
    Check("100 cycles of loading and freeing do not grow", ::cycles),
    Check("200,000 counts and 60,000 errors do not grow", ::strings),
)

private class Check(val name: String, val run: () -> String)

fun main(arguments: Array<String>) {
    demo = arguments[0]
    expected = Expected(File(arguments[1]).readText(), File(arguments[2]).readText())
    for (check in checks) {
        val start = System.nanoTime()
        val found = try {
            check.run()
        } catch (error: Throwable) {
            println("FAILED: ${check.name}")
            error.printStackTrace()
            exitProcess(1)
        }
        println("ok: ${check.name}: $found (%.1f s)".format((System.nanoTime() - start) / 1e9))
    }
}

private fun <T> equal(found: T, wanted: T) = check(found == wanted) { "found $found\nwanted $wanted" }

private fun holds(text: String, part: String) = check(part in text) { "$text\nis without $part" }

private inline fun <reified E : Throwable> thrown(part: String, run: () -> Unit): E {
    val error = try {
        run()
        null
    } catch (error: Throwable) {
        error
    }
    check(error is E) { "found $error instead of ${E::class.java.name} with $part" }
    holds(error.message.orEmpty(), part)
    return error
}

/** Runs on as many threads of the stack that Android gives them, and throws the first error. */
private fun onThreads(count: Int, run: (Int) -> Unit) {
    val errors = java.util.concurrent.ConcurrentLinkedQueue<Throwable>()
    val task = { index: Int -> Runnable { runCatching { run(index) }.onFailure(errors::add) } }
    val threads = List(count) { Thread(null, task(it), "generating $it", 1 shl 20) }
    threads.forEach(Thread::start)
    threads.forEach(Thread::join)
    errors.firstOrNull()?.let { throw it }
}

private fun sameText(): String = Larder(demo, LOAD).use { model ->
    val pieces = mutableListOf<String>()
    val callers = mutableSetOf<Thread>()
    val answer = model.generate(PROMPT, GENERATE) { piece ->
        callers += Thread.currentThread()
        pieces += piece
        true
    }
    equal(pieces.joinToString(""), expected.text)
    equal(callers, setOf(Thread.currentThread()))
    holds(answer, "\"finish\":\"length\"")
    equal(model.generate(PROMPT, GENERATE).substringBefore(",\"finish\""), answer.substringBefore(",\"finish\""))
    holds(model.stats(), "\"misses\":")
    "${pieces.size} pieces, ${expected.text.length} characters"
}

private fun unicode(): String = Larder(demo, LOAD).use { model ->
    equal(textOf(model, NON_ASCII), expected.nonAsciiText)
    val folder = "/nonexistent/木/𝄞"
    val error = thrown<LarderException>(folder) { Larder(folder) }
    error.message!!
}

private fun errors(): String {
    thrown<LarderException>("options to load are not valid") { Larder(demo, "{") }
    thrown<LarderException>("unknown field `cache`") { Larder(demo, """{"cache": 1}""") }
    thrown<LarderException>("--cache") { Larder(demo, """{"cache": "1K"}""") }
    thrown<IllegalArgumentException>("U+0000") { Larder("a\u0000b") }
    return Larder(demo, LOAD).use { model ->
        thrown<IllegalArgumentException>("U+0000") { model.generate("a\u0000b") }
        thrown<LarderException>("options to generate are not valid") { model.generate(PROMPT, "{") }
        val error = thrown<LarderException>("the prompt has") { model.generate("") }
        equal(textOf(model), expected.text)
        error.message!!
    }
}

private fun textOf(model: Larder, prompt: String = PROMPT): String {
    val text = StringBuilder()
    model.generate(prompt, GENERATE) { text.append(it).isNotEmpty() }
    return text.toString()
}

private fun stops(): String = Larder(demo, LOAD).use { model ->
    val pieces = AtomicInteger()
    val answer = model.generate(PROMPT, ENDLESS) { pieces.incrementAndGet() < 5 }
    equal(pieces.get(), 5)
    holds(answer, "\"finish\":\"cancelled\"")
    equal(textOf(model), expected.text)
    "${pieces.get()} pieces"
}

private fun longAnswer(): String = Larder(demo, LOAD).use { model ->
    val pieces = AtomicInteger()
    holds(model.generate(PROMPT, ENDLESS) { pieces.incrementAndGet() > 0 }, "\"finish\":\"length\"")
    check(pieces.get() > 300) { "${pieces.get()} pieces" }
    "${pieces.get()} pieces"
}

private class Thrown(message: String) : Exception(message)

private fun exceptionsOfTheCallback(): String = Larder(demo, LOAD).use { model ->
    val pieces = AtomicInteger()
    val mine = Thrown("of the callback")
    val error = thrown<Thrown>("of the callback") {
        model.generate(PROMPT, ENDLESS) { if (pieces.incrementAndGet() == 3) throw mine else true }
    }
    check(error === mine) { "another exception" }
    equal(pieces.get(), 3)
    thrown<StackOverflowError>("") { model.generate(PROMPT, ENDLESS) { endless(0) > 0 } }
    equal(textOf(model), expected.text)
    "behind ${pieces.get()} pieces"
}

private fun endless(depth: Int): Int = 1 + endless(depth + 1)

private fun reentrance(): String = Larder(demo, LOAD).use { model ->
    val error = thrown<IllegalStateException>("its own model") {
        model.generate(PROMPT, ENDLESS) { model.stats().isNotEmpty() }
    }
    Larder(demo, LOAD).use { other ->
        var text = ""
        model.generate(PROMPT, """{"max-tokens": 4, "temperature": 0}""") { if (text == "") text = textOf(other); true }
        equal(text, expected.text)
    }
    error.message!!
}

private fun threads(): String = Larder(demo, LOAD).use { shared ->
    onThreads(4) { index ->
        if (index % 2 == 0) {
            repeat(4) { equal(textOf(shared), expected.text) }
        } else {
            Larder(demo, LOAD).use { own -> repeat(4) { equal(textOf(own), expected.text) } }
        }
    }
    "4 threads, 16 texts"
}

private fun useAfterClose(): String {
    val model = Larder(demo, LOAD)
    model.close()
    model.close()
    thrown<IllegalStateException>("closed") { model.stats() }
    return thrown<IllegalStateException>("closed") { model.generate(PROMPT) }.message!!
}

private fun closeWhileGenerating(): String {
    val model = Larder(demo, LOAD)
    val pieces = AtomicInteger()
    val started = java.util.concurrent.CountDownLatch(3)
    var answer = ""
    val generating = thread {
        answer = model.generate(PROMPT, ENDLESS) {
            pieces.incrementAndGet()
            started.countDown()
            true
        }
    }
    started.await()
    val start = System.nanoTime()
    model.close()
    val closed = System.nanoTime() - start
    val atClose = pieces.get()
    generating.join(20_000)
    check(!generating.isAlive) { "the answer goes on" }
    holds(answer, "\"finish\":\"cancelled\"")
    check(pieces.get() <= atClose + 1) { "${pieces.get()} pieces, $atClose of them before close" }
    check(closed < 1_000_000_000) { "close took $closed ns" }
    equal(addressOf(model), 0L)
    thrown<IllegalStateException>("closed") { model.stats() }
    return "${pieces.get()} pieces, close took ${closed / 1000} µs"
}

/** The address that the class keeps; there is no other sign of a model that is freed. */
private fun addressOf(model: Larder): Long =
    Larder::class.java.getDeclaredField("model").apply { isAccessible = true }.getLong(model)

private fun closeInCallback(): String {
    val model = Larder(demo, LOAD)
    val pieces = AtomicInteger()
    val answer = model.generate(PROMPT, ENDLESS) {
        pieces.incrementAndGet()
        model.close()
        true
    }
    equal(pieces.get(), 1)
    holds(answer, "\"finish\":\"cancelled\"")
    equal(addressOf(model), 0L)
    return "${pieces.get()} piece"
}

private fun race(): String {
    val closed = AtomicInteger()
    val models = 25
    repeat(models) { round ->
        val model = Larder(demo, LOAD)
        onThreads(4) { index ->
            try {
                when (index) {
                    0 -> model.generate(PROMPT, ENDLESS)
                    1 -> repeat(50) { model.stats() }
                    else -> {
                        Thread.sleep(round.toLong() * index / 2)
                        model.close()
                    }
                }
            } catch (error: IllegalStateException) {
                closed.incrementAndGet()
            }
        }
        equal(addressOf(model), 0L)
    }
    return "$models models, ${closed.get()} calls found theirs closed"
}

/** Memory, open files and threads of the process. */
private class Use(val bytes: Long, val files: Int, val threads: Int) {
    override fun toString() = "%.1f MB, $files files, $threads threads".format(bytes / 1e6)
}

private fun use(): Use {
    System.gc()
    val status = File("/proc/self/status").readLines().first { it.startsWith("RssAnon:") }
    val bytes = status.filter(Char::isDigit).toLong() * 1024
    val count = { folder: String -> File(folder).list()!!.size }
    return Use(bytes, count("/proc/self/fd"), count("/proc/self/task"))
}

private fun cycles(): String {
    val cycle = { Larder(demo, LOAD).use { it.generate(PROMPT, """{"max-tokens": 4}""") } }
    repeat(20) { cycle() }
    val before = use()
    repeat(100) { cycle() }
    return grown(before)
}

/** What is used now, unless it is more than before. A model takes 12 MB or more, 200,000 counts 40 MB, 30,000 errors of a kind 30 MB. */
private fun grown(before: Use): String {
    val after = use()
    check(after.bytes < before.bytes + 20_000_000) { "$before became $after" }
    check(after.files <= before.files && after.threads <= before.threads + 2) { "$before became $after" }
    return "$before, then $after"
}

private fun strings(): String = Larder(demo, LOAD).use { model ->
    val unknown = """{"${"x".repeat(1000)}": 1}"""
    val calls = { counts: Int ->
        repeat(counts) { model.stats() }
        repeat(3 * counts / 20) {
            thrown<LarderException>("unknown field `xxx") { model.generate(PROMPT, unknown) }
            thrown<LarderException>("unknown field `xxx") { Larder(demo, unknown) }
        }
    }
    calls(2_000)
    val before = use()
    calls(200_000)
    grown(before)
}
